"""ImageNet, with torchvision's networks. The images are decoded whenever they are used."""

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import get_model

from onebit.lab.tasks import Task, epochs
from onebit.lab.tasks.images import accuracy, counted_flop
from onebit.lab.tasks.pictures import HubImages

if TYPE_CHECKING:
    from datasets import Dataset

# The usual mean and standard deviation of the training images' channels.
MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


class ImageNet(Task):
    """Classification of photographs.

    The loss is the mean cross-entropy, in nats; the metric is `test_accuracy`, in %. A training
    image is a random part of the photograph (8 % to 100 % of its area, 3:4 to 4:3 in shape), scaled
    to size x size and mirrored half of the time. An evaluated image is the square in the middle
    whose side is seven eighths of the photograph's shorter side. Epochs are as in
    `ImageClassification`.

    model: keywords of torchvision's `get_model`, such as name.
    train, test: `HubImages`.
    batch: the images of a step, of all workers together.
    size: the side of an image in pixels.
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
        _ = self.train, self.test  # loading them fails here rather than during training

    def description(self) -> dict:
        data = zip(("train", "test"), self.sources, (self.train, self.test), strict=True)
        return {
            "data": {
                name: {"source": source.source, "images": len(rows)} for name, source, rows in data
            },
            "summary": f"{self.model_config['name']}, {len(self.train):,} images of "
            f"{self.sources[0].title}, {self.size}x{self.size} pixels",
        }

    @cached_property
    def train(self) -> "Dataset":
        return self.sources[0].rows()

    @cached_property
    def test(self) -> "Dataset":
        return self.sources[1].rows()

    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        random = np.random.default_rng([seed, step, rank])
        start = step * self.step_batch + rank * size
        chosen = epochs.samples(seed, start, size, len(self.train))
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

    def _scaled(self, image: Image, box: tuple[float, ...], mirrored: bool) -> np.ndarray:
        """The part of an image in the box, normalised: float32 [3, size, size].

        box: (left, top, right, bottom).
        """
        scaled = image.convert("RGB").resize((self.size, self.size), Resampling.BILINEAR, box)
        pixels = np.asarray(scaled, np.float32)
        pixels = pixels[:, ::-1] if mirrored else pixels
        return np.ascontiguousarray(((pixels / 255 - MEAN) / DEVIATION).transpose(2, 0, 1))


def random_box(width: int, height: int, random: np.random.Generator) -> tuple[float, ...]:
    """A box inside the image, of 8 % to 100 % of its area and 3:4 to 4:3 in shape.

    If ten draws do not fit into the image, it is the middle.
    """
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
    """A square in the middle, of seven eighths of the shorter side: 224 of 256."""
    side = 0.875 * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
