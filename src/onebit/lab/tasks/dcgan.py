"""DCGAN (Radford et al. 2016): the paper's network for CelebA, and smaller ones of its kind."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision.utils import save_image

from onebit.lab.tasks import Loss, Task, epochs
from onebit.lab.tasks.pictures import Splits

GRID = 8  # the number of rows and columns in samples.png


def generator(*, noise: int, width: int, side: int) -> nn.Sequential:
    """noise [n, noise] -> images [n, 3, side, side], from -1 to 1.

    Transposed convolutions of 4x4. The first makes 4x4 pixels; each further one doubles the side
    and halves the channels, down to `width` channels at half the side; the last makes the 3
    channels. BatchNorm and ReLU follow each but the last, which tanh follows.
    """
    channels = [width << stage for stage in reversed(range(_stages(side)))]
    layers = [
        nn.Unflatten(1, (noise, 1, 1)),
        nn.ConvTranspose2d(noise, channels[0], 4, bias=False),
        nn.BatchNorm2d(channels[0]),
        nn.ReLU(),
    ]
    for before, after in zip(channels[:-1], channels[1:], strict=True):
        layers += [
            nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers, nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1, bias=False), nn.Tanh()
    )


def discriminator(*, width: int, side: int) -> nn.Sequential:
    """images [n, 3, side, side] -> logits [n] of being real.

    The generator's mirror image: convolutions of 4x4, each to half the side. LeakyReLU of slope 0.2
    follows each but the last, with BatchNorm before it for all but the first.
    """
    channels = [width << stage for stage in range(_stages(side))]
    layers = [nn.Conv2d(3, width, 4, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2)]
    for before, after in zip(channels[:-1], channels[1:], strict=True):
        layers += [
            nn.Conv2d(before, after, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(channels[-1], 1, 4, bias=False), nn.Flatten(0))


def _stages(side: int) -> int:
    stages = side.bit_length() - 3
    if stages < 1 or side != 4 << stages:
        raise ValueError(
            f"The side of a DCGAN's images is 8, 16, 32, 64 ... pixels, not {side}: set task.size."
        )
    return stages


class Dcgan(Splits, Task):
    """Two players: the discriminator D tells images from those that the generator G makes of noise.

    In each step D comes first, with the step's images x and noise z, and then G with the same z:

        loss of D = -mean log D(x) - mean log(1 - D(G(z)))
        loss of G = -mean log D(G(z))

    The images are scaled to -1 .. 1 and not augmented; an epoch has each once. z is normal. The
    weights of all convolutions begin normal with deviation 0.02, and BatchNorm's factors with mean
    1 and the same deviation. D sees the batch of images and that of G separately, so that BatchNorm
    normalises each by itself.

    The metric is `sliced_wasserstein` between the held-out images and as many of the generator's;
    lower is better. samples.png in the run's folder shows what the generator makes of 8x8 noise
    vectors, which are the same in all runs.

    model: noise, the length of z; width, the channels at half the side, of G and of D.
    train, test: members of `tasks.pictures`, or `tasks.faces`.
    batch, size, cache, subset, test_subset: as in `ImageClassification`.
    """

    evaluates = True

    def __init__(
        self,
        *,
        model: dict,
        train,
        test,
        batch: int,
        size: int,
        cache: str,
        subset: int | None = None,
        test_subset: int | None = None,
    ):
        self.noise, self.width = _sizes(**model)
        self.sources = {"train": (train, subset), "test": (test, test_subset)}
        self.step_batch = batch
        self.size = size
        self.cache = Path(cache).expanduser()

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {
                "generator": generator(noise=self.noise, width=self.width, side=self.size),
                "discriminator": discriminator(width=self.width, side=self.size),
            }
        )
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)
        return model

    def players(self, model: nn.Module) -> dict[str, tuple[nn.Module, Loss]]:
        return {
            "discriminator": (model["discriminator"], self.discriminator_loss),
            "generator": (model["generator"], self.loss),
        }

    def discriminator_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The discriminator's loss, which has no gradients for the generator."""
        with torch.no_grad():
            generated = model["generator"](batch["noise"])
        return cross_entropy(model["discriminator"](batch["images"]), 1.0) + cross_entropy(
            model["discriminator"](generated), 0.0
        )

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The generator's loss, which has no gradients for the discriminator."""
        constants = {
            name: parameter.detach()
            for name, parameter in model["discriminator"].named_parameters()
        }
        return cross_entropy(
            functional_call(model["discriminator"], constants, model["generator"](batch["noise"])),
            1.0,
        )

    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        chosen = epochs.samples(
            seed, step * self.step_batch + rank * size, size, len(self.train.images)
        )
        noise = np.random.default_rng([seed, step, rank]).standard_normal(
            (size, self.noise), np.float32
        )
        return {"images": scaled(self.train.images[chosen]), "noise": torch.from_numpy(noise)}

    def prepare(self) -> None:
        if len(self.train.images) < max(len(self.test.images), self.step_batch):
            raise ValueError(
                f"{self.train.source} has {len(self.train.images)} images: too few for batches of "
                f"{self.step_batch}, or to compare with {len(self.test.images)} held-out ones. Set "
                "task.subset, task.test_subset or batch."
            )

    def description(self) -> dict:
        """Facts for run.json.

        `real_distance` is the metric of the training images, which a perfect generator would reach.
        """
        count = len(self.test.images)
        real = sliced_wasserstein(scaled(self.train.images[:count]), scaled(self.test.images))
        return {
            "data": {"train": self.train.description(), "test": self.test.description()},
            "summary": f"DCGAN, {self.width} channels wide, z of {self.noise} numbers, "
            f"{len(self.train.images):,} images of {self.train.title}, "
            f"{self.size}x{self.size} pixels",
            "evaluated": f"Distance: sliced Wasserstein, from {count:,} held-out images to as many "
            f"that the mean of the workers' models generates (training images: {real:.3f}).",
            "real_distance": real,
        }

    @torch.no_grad()
    def generated(self, model: nn.Module, device: torch.device, count: int) -> Tensor:
        """What the generator makes of the first `count` vectors of noise, on the CPU.

        The noise is the same in all runs.
        """
        noise = torch.from_numpy(
            np.random.default_rng(0).standard_normal((count, self.noise), np.float32)
        )
        return torch.cat(
            [model["generator"](part.to(device)).float().cpu() for part in noise.split(500)]
        )

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        model.eval()
        held_out = scaled(self.test.images)
        return {
            "sliced_wasserstein": sliced_wasserstein(
                self.generated(model, device, len(held_out)), held_out
            )
        }

    def illustrate(self, model: nn.Module, device: torch.device, folder: Path) -> None:
        model.eval()
        save_image(
            self.generated(model, device, GRID**2),
            folder / "samples.png",
            nrow=GRID,
            padding=0,
            normalize=True,
            value_range=(-1, 1),
        )

    def flop(self, length: int) -> float:
        """Counted over the turns of both players."""
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            model = self.model()
            batch = {
                "images": torch.empty(1, 3, self.size, self.size),
                "noise": torch.empty(1, self.noise),
            }
            for _, loss in self.players(model).values():
                loss(model, batch).backward()
        return counter.get_total_flops()


def _sizes(*, noise: int, width: int) -> tuple[int, int]:
    return noise, width


def cross_entropy(logits: Tensor, label: float) -> Tensor:
    """The mean of -log of the probability of this label, in nats."""
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def scaled(images: np.ndarray) -> Tensor:
    """uint8 [n, side, side, 3] -> float32 [n, 3, side, side], from -1 to 1."""
    return torch.from_numpy(images.astype(np.float32).transpose(0, 3, 1, 2) / 127.5 - 1)


def sliced_wasserstein(ones: Tensor, others: Tensor, directions: int = 256) -> float:
    """The sliced Wasserstein distance of two sets of equally many images (Rabin et al. 2011).

        mean over random unit vectors d of W1(ones d, others d)
        W1(a, b) = mean over i of |i-th smallest of a - i-th smallest of b|

    The unit is that of a pixel. The directions are the same at each call. Colours, places and the
    variation among the images count, sharpness hardly does. Two samples of the same kind do not
    have distance 0, but one that falls with the number of images.
    """
    random = torch.Generator().manual_seed(0)
    d = functional.normalize(torch.randn(ones[0].numel(), directions, generator=random), dim=0)
    return (
        (
            torch.sort(ones.flatten(1) @ d, dim=0).values
            - torch.sort(others.flatten(1) @ d, dim=0).values
        )
        .abs()
        .mean()
        .item()
    )
