"""Sources of images, and the decoded images on disk.

A source yields (image, label), the image as uint8 [height, width, 3]. All are decoded once.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch.nn import functional

from onebit.lab.tasks.hub import HubRows

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1  # a part of the cache's key: increase it when the stored format changes


@dataclass(frozen=True)
class Pictures:
    """Decoded images of one size.

    images: uint8 [n, side, side, 3].
    labels: int64 [n].
    mean, deviation: float32 [3], of each channel over all images of the split.
    source, title: where they come from, for run.json and for captions.
    """

    images: np.ndarray
    labels: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    source: str
    title: str

    @property
    def classes(self) -> int:
        """The number of classes, whose labels begin at 0."""
        return int(self.labels.max()) + 1

    def first(self, count: int | None) -> "Pictures":
        """Only so many first images, or all if None."""
        if count is not None and not 1 <= count <= len(self.labels):
            raise ValueError(
                f"{self.source} has {len(self.labels)} images: choose a subset from 1 to as many, "
                f"not {count}."
            )
        return replace(self, images=self.images[:count], labels=self.labels[:count])

    def description(self) -> dict:
        """Facts for run.json."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images))
        digest.update(self.labels.tobytes())
        return {"source": self.source, "images": len(self.labels), "sha256": digest.hexdigest()}


class HubImages(HubRows):
    """Rows with an image and a label, see `HubRows`.

    image, label: the names of the columns.
    title: what a caption calls the data. "(JPEG)" is added if the images have been compressed so.
    crop: take only the middle square of so many pixels a side; None: take the whole image.
    """

    def __init__(
        self, *, image: str, label: str, title: str, crop: int | None = None, **options: Any
    ):
        super().__init__(**options)
        self.image, self.label = image, label
        self.plain_title = title
        self.crop = crop

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.image} {self.label}" + (
            f" {self.crop}" if self.crop else ""
        )

    def pictures(self) -> Iterator[tuple[np.ndarray, int]]:
        """All images with their labels."""
        for row in self.rows():
            yield self._middle(np.asarray(row[self.image].convert("RGB"))), row[self.label]

    def _middle(self, image: np.ndarray) -> np.ndarray:
        if self.crop is None:
            return image
        height, width = image.shape[:2]
        if self.crop > min(height, width):
            raise ValueError(
                f"An image of {width}x{height} pixels has no square of crop={self.crop}: choose a "
                "smaller one."
            )
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        return image[top : top + self.crop, left : left + self.crop]

    @property
    def title(self) -> str:
        """What a caption calls the data."""
        compressed = self.rows()[0][self.image].format == "JPEG"
        return self.plain_title + " (JPEG)" * compressed

    def decoded(self, rows: "Dataset", numbers: Iterable[int]) -> tuple[list, list[int]]:
        """The PIL images and the labels of some of the `rows()`."""
        found = [rows[int(number)] for number in numbers]
        return [row[self.image] for row in found], [row[self.label] for row in found]

    def rows(self) -> "Dataset":
        """The data set, whose images are decoded to PIL's when they are read."""
        from datasets import Image

        return self.load(self.image, self.label).cast_column(self.image, Image())


class Gratings:
    """Made-up images, which need no download: stripes whose direction is the class, with noise.

    Their colours, phases and widths are random.

    count: the number of images.
    side: the side of an image in pixels.
    seed: another seed gives other images of the same kind.
    """

    title = source = "made-up gratings"

    def __init__(self, *, count: int, side: int, seed: int, classes: int = 10):
        self.count, self.side, self.seed, self.classes = count, side, seed, classes

    def fingerprint(self) -> str:
        return f"gratings {self.count} {self.side} {self.seed} {self.classes}"

    def pictures(self) -> Iterator[tuple[np.ndarray, int]]:
        random = np.random.default_rng(self.seed)
        y, x = np.mgrid[: self.side, : self.side] / self.side
        for number in range(self.count):
            label = number % self.classes
            angle = np.pi * label / self.classes
            wave = np.sin(
                2
                * np.pi
                * (random.uniform(2, 4) * (x * np.cos(angle) + y * np.sin(angle)) + random.random())
            )
            image = (
                128
                + 60 * wave[:, :, None] * random.uniform(-1, 1, 3)
                + 20 * random.normal(size=(self.side, self.side, 3))
            )
            yield np.clip(image, 0, 255).astype(np.uint8), label


def load_pictures(source: Any, size: int, cache: Path) -> Pictures:
    """The images of a source at `size` pixels a side, from `cache`.

    If they are not there, one process decodes them while the others wait.
    """
    key = hashlib.sha256(f"{FORMAT}|{source.fingerprint()}|{size}".encode()).hexdigest()[:16]
    folder = cache / f"images-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _build(source, size, folder)
    about = json.loads((folder / "about.json").read_text())
    images, labels = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")
    )
    return Pictures(
        images,
        np.array(labels),
        *(np.float32(about.pop(name)) for name in ("mean", "deviation")),
        **about,
    )


class Splits:
    """The train and test pictures of a task.

    The task sets `size`, `cache` and `sources`, {name: (source, so many of its first pictures)}.
    """

    @cached_property
    def train(self) -> Pictures:
        """The images that are trained on."""
        return self._load("train")

    @cached_property
    def test(self) -> Pictures:
        """The images that are evaluated."""
        return self._load("test")

    def _load(self, name: str) -> Pictures:
        source, count = self.sources[name]
        return load_pictures(source, self.size, self.cache).first(count)


def _build(source: Any, size: int, folder: Path) -> None:
    partial = folder.with_suffix(".partial")  # may be there if a process was killed
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    found = [(_square(image, size), label) for image, label in source.pictures()]
    images, labels = (
        np.stack([image for image, _ in found]),
        np.array([label for _, label in found], np.int64),
    )
    # The shares of the 256 levels of each channel give its mean and deviation. All pixels as
    # floating-point numbers would fill the memory.
    share = (
        np.stack([np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(3)])
        / images[..., 0].size
    )
    mean = share @ np.arange(256)
    deviation = np.sqrt(share @ np.arange(256) ** 2 - mean**2)
    about = {
        "mean": mean.tolist(),
        "deviation": deviation.tolist(),
        "source": source.source,
        "title": source.title,
    }
    np.save(partial / "images.npy", images)
    np.save(partial / "labels.npy", labels)
    (partial / "about.json").write_text(json.dumps(about))
    partial.rename(folder)


def _square(image: np.ndarray, size: int) -> np.ndarray:
    """The image, scaled down to `size` pixels a side by averaging."""
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    if height != width or height % size:
        raise ValueError(
            f"An image of {width}x{height} pixels cannot be averaged to {size}x{size}: choose a "
            "size that divides both."
        )
    blocks = torch.from_numpy(image.copy()).permute(2, 0, 1).float()[None]
    return functional.avg_pool2d(blocks, height // size)[0].round().byte().permute(1, 2, 0).numpy()
