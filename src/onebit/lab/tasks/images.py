"""Image classification: the paper's ResNet-18 on CIFAR-10, and smaller ones of its kind."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.resnet import BasicBlock

from onebit.lab.tasks import Task, epochs
from onebit.lab.tasks.pictures import Splits


class ResNet(nn.Module):
    """The residual network of He et al. 2016 for small images, of torchvision's BasicBlocks.

    A 3x3 convolution to `width` channels; stages of blocks, each stage but the first with half the
    resolution and twice the channels; the mean over the image; and a linear layer. Width 64 and
    blocks 2, 2, 2, 2 give ResNet-18 with the stem that is usual for CIFAR-10 (no stride, no
    max-pool). The weights of convolutions begin as in He et al. 2015 (fan-out), as torchvision's.
    """

    def __init__(self, *, width: int, blocks: list[int], classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            stages.append(self._stage(channels, width << stage, count, stride=2 if stage else 1))
            channels = width << stage
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(before: int, channels: int, count: int, stride: int) -> nn.Sequential:
        shortcut = None
        if before != channels:
            shortcut = nn.Sequential(
                nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        return nn.Sequential(
            BasicBlock(before, channels, stride, shortcut),
            *(BasicBlock(channels, channels) for _ in range(count - 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        return self.fc(self.stages(x).mean((2, 3)))


class ImageClassification(Splits, Task):
    """Classification of small images.

    The loss is the mean cross-entropy, in nats; the metric is `test_accuracy`, in %. An epoch has
    each training image once (see `epochs.samples`); the workers take disjoint parts of a step's
    batch. As usual for CIFAR-10, an image is shifted by up to an eighth of its side (4 pixels of
    32; zeros move in), mirrored half of the time, and normalised by the mean and standard deviation
    of each channel.

    model: keywords of `ResNet`.
    train, test: members of `tasks.pictures`.
    batch: the images of a step, of all workers together.
    size: the side of an image in pixels, to which larger ones are scaled down.
    subset: train on so many first images only; None: all.
    test_subset: evaluate so many first images only; None: all.
    cache: the folder for the decoded images; it may be deleted at any time.
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
        self.model_config = dict(model)
        self.sources = {"train": (train, subset), "test": (test, test_subset)}
        self.step_batch = batch
        self.size = size
        self.cache = Path(cache).expanduser()

    def model(self) -> nn.Module:
        return ResNet(**self.model_config)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["images"]), batch["labels"])

    def flop(self, length: int) -> float:
        return counted_flop(self.model, self.size)

    def prepare(self) -> None:
        for pictures in (self.train, self.test):
            if pictures.classes > self.model_config["classes"]:
                raise ValueError(
                    f"{pictures.source} has {pictures.classes} classes: set "
                    f"task.model.classes={pictures.classes}."
                )

    def description(self) -> dict:
        return {
            "data": {
                name: pictures.description()
                for name, pictures in (("train", self.train), ("test", self.test))
            },
            "summary": f"{self.network}, {len(self.train.labels):,} images of "
            f"{self.train.title}, {self.size}x{self.size} pixels",
        }

    @property
    def network(self) -> str:
        """What a caption calls the network."""
        width, blocks = self.model_config["width"], self.model_config["blocks"]
        if (width, list(blocks)) == (64, [2, 2, 2, 2]):
            return "ResNet-18"
        return f"ResNet of {len(blocks)} stages, {width} to {width << len(blocks) - 1} wide"

    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        start = step * self.step_batch + rank * size
        chosen = epochs.samples(seed, start, size, len(self.train.labels))
        images = moved(self.train.images[chosen], np.random.default_rng([seed, step, rank]))
        return {
            "images": self._normalised(images),
            "labels": torch.from_numpy(self.train.labels[chosen]),
        }

    def _normalised(self, images: np.ndarray) -> Tensor:
        """uint8 [n, side, side, 3] -> float32 [n, 3, side, side]."""
        normalised = (images.astype(np.float32) - self.train.mean) / self.train.deviation
        return torch.from_numpy(normalised.transpose(0, 3, 1, 2).copy())

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        parts = [slice(start, start + 500) for start in range(0, len(self.test.labels), 500)]
        return accuracy(
            model,
            device,
            (
                (self._normalised(self.test.images[part]), torch.from_numpy(self.test.labels[part]))
                for part in parts
            ),
        )


@torch.no_grad()
def accuracy(
    model: nn.Module, device: torch.device, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """`test_accuracy`: the share of images whose likeliest class is their label, in %."""
    model.eval()
    right = total = 0
    for images, labels in batches:
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
        total += len(labels)
    return {"test_accuracy": 100 * right / total}


def counted_flop(model: Callable[[], nn.Module], size: int) -> float:
    """Operations of one image: 3 times those forward, since backward takes twice as many."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model().eval()(torch.empty(1, 3, size, size))
    return 3 * counter.get_total_flops()


def moved(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The images, each shifted by up to an eighth of its side, and mirrored half of the time.

    Zeros move in where an image is shifted away.
    """
    count, side = images.shape[:2]
    pad = side // 8
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    top, left = random.integers(0, 2 * pad + 1, (2, count, 1))
    along = np.arange(side)
    columns = np.where(random.random((count, 1)) < 0.5, along[::-1], along) + left
    return padded[np.arange(count)[:, None, None], (along + top)[:, :, None], columns[:, None, :]]
