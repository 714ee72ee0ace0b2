"""ImageNet: images too many and too large to keep decoded, in torchvision's own networks."""

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import get_model

from onebit.lab.tasks import Task
from onebit.lab.tasks.images import accuracy, chosen_images, counted_flop
from onebit.lab.tasks.pictures import HubImages

# Of the training images' channels, as everybody has it.
MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


class ImageNet(Task):
    """Classification of photographs; the loss is the mean cross-entropy, in nats, the metric `test_accuracy`, in %.

    A training image is a random part, 8 % to 100 % of its area and 3:4 to 4:3 in shape, scaled to size x size, mirrored half of the time;
    one that is evaluated is the middle seven eighths of its shorter side, squared. Epochs as in `ImageClassification`. Each image is decoded
    when it is drawn.

    model: keywords of torchvision's `get_model`, such as name.
    train, test: `HubImages`. batch: samples of a step, of all workers. size: in pixels.
    """

    evaluates = True

    def __init__(self, *, model: dict, train: HubImages, test: HubImages, batch: int, size: int):
        self.model_config = dict(model)
        self.sources = (train, test)
        self.step_batch = batch
        self.size = size

    def model(self) -> nn.Module:
        return get_model(**self.model_config)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["images"]), batch["labels"])

    def flop(self, length: int) -> float:
        return counted_flop(self.model, self.size)

    def prepare(self) -> None:
        _ = self.train, self.test  # loaded, or refused

    def description(self) -> dict:
        data = zip(("train", "test"), self.sources, (self.train, self.test), strict=True)
        return {
            "data": {
                name: {"source": source.source, "images": len(rows)} for name, source, rows in data
            },
            "summary": f"{self.model_config['name']}, {len(self.train):,} images of {self.sources[0].title}, {self.size}x{self.size} pixels",
        }

    @cached_property
    def train(self):
        return self.sources[0].rows()

    @cached_property
    def test(self):
        return self.sources[1].rows()

    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        random = np.random.default_rng([seed, step, rank])
        chosen = chosen_images(seed, step * self.step_batch + rank * size, size, len(self.train))
        images, labels = self.sources[0].decoded(self.train, chosen)
        pictures = [
            self._scaled(image, random_box(*image.size, random), mirrored=random.random() < 0.5)
            for image in images
        ]
        return {"images": torch.from_numpy(np.stack(pictures)), "labels": torch.tensor(labels)}

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        return accuracy(model, device, map(self._test_batch, range(0, len(self.test), 100)))

    def _test_batch(self, start: int) -> tuple[Tensor, Tensor]:
        images, labels = self.sources[1].decoded(
            self.test, range(start, min(start + 100, len(self.test)))
        )
        pictures = [
            self._scaled(image, middle_box(*image.size), mirrored=False) for image in images
        ]
        return torch.from_numpy(np.stack(pictures)), torch.tensor(labels)

    def _scaled(self, image, box: tuple[float, ...], mirrored: bool) -> np.ndarray:
        """The part of a PIL image in the box (left, top, right, bottom), normalised: float32 [3, size, size]."""
        pixels = np.asarray(
            image.convert("RGB").resize((self.size, self.size), resample=2, box=box), np.float32
        )  # 2: bilinear
        pixels = pixels[:, ::-1] if mirrored else pixels
        return np.ascontiguousarray(((pixels / 255 - MEAN) / DEVIATION).transpose(2, 0, 1))


def random_box(width: int, height: int, random: np.random.Generator) -> tuple[float, ...]:
    """Inside the image, of 8 % to 100 % of its area and 3:4 to 4:3 in shape; the middle, if ten draws do not fit."""
    for _ in range(10):
        area, shape = (
            width * height * random.uniform(0.08, 1),
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        wide, high = math.sqrt(area * shape), math.sqrt(area / shape)
        if wide <= width and high <= height:
            left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
            return left, top, left + wide, top + high
    return middle_box(width, height)


def middle_box(width: int, height: int) -> tuple[float, ...]:
    """A square of seven eighths of the shorter side: 224 of 256."""
    side = 0.875 * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
