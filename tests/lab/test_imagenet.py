"""ImageNet's loader: random parts of photographs to train on, their middle to evaluate, as a
function of (seed, step, rank).
"""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from onebit.lab.config import composed
from onebit.lab.tasks.imagenet import middle_box, random_box
from onebit.lab.training.run import run_from

SIZES = [(40, 30), (30, 40), (50, 20), (33, 33), (64, 48)]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Five photographs of several sizes, in the hub's schema, each of one grey level, which is
    40 times its label.
    """
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "imagenet").mkdir()
    rows = []
    for label, (width, height) in enumerate(SIZES):
        file = io.BytesIO()
        Image.fromarray(np.full((height, width), 40 * label, np.uint8)).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": label})
    for split in ("train", "validation"):
        pd.DataFrame(rows).to_parquet(tmp_path / "imagenet" / f"{split}.parquet")
    return run_from(
        composed(
            [
                "experiment=imagenet",
                "profile=smoke",
                "comm=threads",
                f"data_root={tmp_path}",
                "batch=20",
                "micro_batch=5",
            ]
        )
    ).task


def level(images):
    """The grey level of normalised images."""
    return (
        (
            images * torch.tensor([0.229, 0.224, 0.225])[:, None, None]
            + torch.tensor([0.485, 0.456, 0.406])[:, None, None]
        )
        * 255
    ).mean((1, 2, 3))


def test_photographs_are_scaled_and_normalised_and_an_epoch_sees_each_once(task):
    batch = task.batch(1, 0, 0, 10, 1)
    assert batch["images"].shape == (10, 3, 32, 32) and batch["images"].dtype == torch.float32
    assert level(batch["images"]).tolist() == pytest.approx(
        (40 * batch["labels"]).tolist(), abs=1e-3
    )
    labels = batch["labels"].tolist()
    assert sorted(labels[:5]) == sorted(labels[5:]) == list(range(5))


def test_a_batch_of_photographs_is_a_function_of_seed_step_and_rank(task):
    batch = task.batch(3, 5, 1, 4, 1)
    task.batch(0, 0, 0, 4, 1)
    assert all(torch.equal(batch[key], task.batch(3, 5, 1, 4, 1)[key]) for key in batch)


def test_every_photograph_is_evaluated(task):
    class Knows(torch.nn.Module):
        def forward(self, x):
            return -(level(x)[:, None] - 40 * torch.arange(4)).abs()  # knows 4 of 5

    assert task.evaluate(Knows(), torch.device("cpu")) == {"test_accuracy": pytest.approx(80)}
    assert task.description()["summary"] == "resnet18, 5 images of ImageNet, 32x32 pixels"


def test_a_random_part_lies_inside_with_the_areas_and_shapes_that_are_usual():
    random = np.random.default_rng(0)
    boxes = np.array([random_box(400, 300, random) for _ in range(2000)])
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (
        (boxes[:, :2] >= 0).all()
        and (boxes[:, 2] <= 400 + 1e-9).all()
        and (boxes[:, 3] <= 300 + 1e-9).all()
    )
    area, shape = wide * high / (400 * 300), wide / high
    assert 0.08 <= area.min() < 0.1 and 0.85 < area.max() <= 1
    assert 0.75 <= shape.min() < 0.77 and 1.3 < shape.max() <= 4 / 3 + 1e-9


def test_the_middle_is_what_is_evaluated():
    assert middle_box(256, 512) == (16, 144, 240, 368)


def test_the_papers_network_is_resnet152():
    """60.2 M parameters, and 11.5 G multiplications and additions an image."""
    task = run_from(
        composed(["experiment=imagenet", "profile=paper", "comm=threads", "workers=8"])
    ).task
    with torch.device("meta"):
        assert sum(p.numel() for p in task.model().parameters()) == 60_192_808
    assert task.flop(1) == pytest.approx(6 * 11.5e9, rel=0.01)
