"""CIFAR-10's batches, network and accuracy: what is usual for it, as a function of (seed, step,
rank).
"""

import io
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from onebit.lab.tasks.images import ImageClassification, ResNet, moved
from onebit.lab.tasks.pictures import Gratings, HubImages, load_pictures

SIDE = 8


class Numbered:
    """Images with a class of their own each, so that a batch's labels say which they are."""

    source = title = "numbered"

    def __init__(self, count=30):
        self.count = count

    def fingerprint(self):
        return f"numbered {self.count}"

    def pictures(self):
        yield from (
            (
                np.random.default_rng(number).integers(256, size=(SIDE, SIDE, 3)).astype(np.uint8),
                number,
            )
            for number in range(self.count)
        )


def task(cache, source=None, batch=12, **options):
    model = {"width": 4, "blocks": [1], "classes": 30}
    return ImageClassification(
        model=model,
        train=source or Numbered(),
        test=source or Numbered(),
        batch=batch,
        size=SIDE,
        cache=cache,
        **options,
    )


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return task(tmp_path_factory.mktemp("cache"))


def labels(numbered, seed, step, rank, workers):
    return numbered.batch(seed, step, rank, 12 // workers, 1)["labels"].tolist()


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_an_epoch_sees_each_image_once_and_the_workers_take_disjoint_parts(numbered, workers):
    """5 steps of 12 are 2 epochs of 30 images, the third step belongs to both.

    And the steps are those of a single worker.
    """
    steps = [
        [number for rank in range(workers) for number in labels(numbered, 3, step, rank, workers)]
        for step in range(5)
    ]
    assert steps == [labels(numbered, 3, step, 0, 1) for step in range(5)]
    seen = sum(steps, [])
    assert sorted(seen[:30]) == sorted(seen[30:]) == list(range(30))
    assert seen[:30] != seen[30:]


def test_a_batch_is_a_function_of_seed_step_and_rank(numbered):
    batch = numbered.batch(3, 5, 1, 4, 1)
    numbered.batch(0, 0, 0, 4, 1)
    again = numbered.batch(3, 5, 1, 4, 1)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 2)):
        assert not torch.equal(batch["images"], numbered.batch(*other, 4, 1)["images"])


def test_an_image_is_shifted_by_up_to_an_eighth_and_mirrored_half_of_the_time():
    image = np.random.default_rng(0).integers(1, 256, size=(16, 16, 3)).astype(np.uint8)
    framed = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    known = {}
    for top, left, mirrored in product(range(5), range(5), (False, True)):
        part = framed[top : top + 16, left : left + 16]
        known[(part[:, ::-1] if mirrored else part).tobytes()] = (top, left, mirrored)
    found = [
        known[part.tobytes()]
        for part in moved(np.repeat(image[None], 4000, axis=0), np.random.default_rng(1))
    ]
    assert set(found) == set(known.values())
    assert np.mean([mirrored for _, _, mirrored in found]) == pytest.approx(
        0.5, abs=0.03
    )  # 4 standard errors
    assert np.mean([top for top, _, _ in found]) == pytest.approx(2, abs=0.09)
    assert np.mean([left for _, left, _ in found]) == pytest.approx(2, abs=0.09)


def test_each_channel_of_the_training_images_has_mean_0_and_variance_1(numbered):
    images = numbered._normalised(numbered.train.images)
    assert images.shape == (30, 3, SIDE, SIDE) and images.dtype == torch.float32
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-5)
    assert images.var((0, 2, 3), correction=0).tolist() == pytest.approx([1] * 3, abs=1e-4)


def test_the_network_is_torchvisions_resnet18_behind_another_stem():
    torch.manual_seed(0)
    ours, theirs = ResNet(width=64, blocks=[2, 2, 2, 2], classes=10), resnet18(num_classes=10)
    theirs.conv1, theirs.maxpool = (
        torch.nn.Conv2d(3, 64, 3, padding=1, bias=False),
        torch.nn.Identity(),
    )
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 32, 32)
    for mode in (True, False):
        assert torch.allclose(ours.train(mode)(x), theirs.train(mode)(x), atol=1e-4)


def test_convolutions_begin_with_the_spread_of_torchvisions():
    ours, theirs = ResNet(width=64, blocks=[2, 2, 2, 2], classes=10), resnet18(num_classes=10)
    for one, two in zip(list(ours.parameters())[3:], list(theirs.parameters())[3:], strict=True):
        if one.ndim == 4:
            assert one.std().item() == pytest.approx(two.std().item(), rel=0.05)


def test_accuracy_is_the_share_of_images_that_are_named_right(numbered):
    """A model that knows the first 20 of 30 images and takes all others for the first."""
    shown = numbered._normalised(numbered.test.images)

    class Knows(torch.nn.Module):
        def forward(self, x):
            match = (x[:, None] == shown[None]).flatten(2).all(2).float()
            match[:, 20:] = 0
            return match

    assert numbered.evaluate(Knows(), torch.device("cpu")) == {
        "test_accuracy": pytest.approx(100 * 20 / 30)
    }


def stored(folder, count=3, form="PNG", side=SIDE, column="img"):
    """count images, as the hub's parquet stores them, in folder/cifar10/{train,test}.parquet."""
    (folder / "cifar10").mkdir(parents=True)
    rows = []
    for image, label in Numbered(count).pictures():
        file = io.BytesIO()
        Image.fromarray(np.kron(image, np.ones((side // SIDE, side // SIDE, 1), np.uint8))).save(
            file, form
        )
        rows.append({column: {"bytes": file.getvalue(), "path": None}, "label": label})
    for split in ("train", "test"):
        pd.DataFrame(rows).to_parquet(folder / "cifar10" / f"{split}.parquet")


def hub(data_root, split="train"):
    options = {
        "name": "cifar10",
        "path": "uoft-cs/cifar10",
        "image": "img",
        "label": "label",
        "title": "CIFAR-10",
    }
    return HubImages(split=split, data_root=data_root and str(data_root), **options)


@pytest.fixture(autouse=True)
def own_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def test_hub_schema_is_read_from_the_data_root_and_decoded_once(tmp_path, monkeypatch):
    stored(tmp_path / "data")
    source = hub(tmp_path / "data")
    pictures = load_pictures(source, SIDE, tmp_path / "cache")
    expected = list(Numbered(3).pictures())
    assert [label for _, label in expected] == pictures.labels.tolist()
    assert np.array_equal(pictures.images, [image for image, _ in expected])
    assert (pictures.source, pictures.title) == ("cifar10/train.parquet", "CIFAR-10")
    monkeypatch.setattr(source, "pictures", None)
    assert np.array_equal(load_pictures(source, SIDE, tmp_path / "cache").images, pictures.images)


def test_a_caption_says_that_images_were_stored_as_jpeg(tmp_path):
    stored(tmp_path / "data", form="JPEG")
    there = task(tmp_path / "cache", hub(tmp_path / "data"), subset=2)
    assert (
        there.description()["summary"]
        == "ResNet of 1 stages, 4 to 4 wide, 2 images of CIFAR-10 (JPEG), 8x8 pixels"
    )
    data = there.description()["data"]["train"]
    assert (data["source"], data["images"], len(data["sha256"])) == ("cifar10/train.parquet", 2, 64)


def test_larger_images_are_averaged(tmp_path):
    stored(tmp_path / "data", side=2 * SIDE)
    assert np.array_equal(
        load_pictures(hub(tmp_path / "data"), SIDE, tmp_path / "cache").images,
        [image for image, _ in Numbered(3).pictures()],
    )
    with pytest.raises(ValueError, match="choose a size that divides"):
        load_pictures(hub(tmp_path / "data"), 5, tmp_path / "cache")


def test_missing_images_give_the_command_that_fetches_them(tmp_path, monkeypatch):
    command = r"load_dataset\('uoft-cs/cifar10', split='train'\)"
    with pytest.raises(RuntimeError, match=command):
        task(tmp_path / "cache", hub(tmp_path)).prepare()
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match=command):
        task(tmp_path / "cache", hub(None)).prepare()


def test_another_schema_is_named(tmp_path):
    stored(tmp_path / "data", column="picture")
    with pytest.raises(
        RuntimeError, match="has the columns picture, label, and must have one named img"
    ):
        task(tmp_path / "cache", hub(tmp_path / "data")).prepare()


def test_too_few_classes_or_images_are_refused(tmp_path):
    too_few = task(tmp_path)
    too_few.model_config["classes"] = 29
    with pytest.raises(ValueError, match="task.model.classes=30"):
        too_few.prepare()
    with pytest.raises(ValueError, match="from 1 to as many"):
        task(tmp_path, subset=31).prepare()


def test_gratings_are_the_same_at_each_call_and_differ_by_seed(tmp_path):
    chosen = ((0, "a"), (0, "b"), (1, "a"))
    first, again, other = (
        load_pictures(Gratings(count=20, side=16, seed=seed), 16, tmp_path / cache)
        for seed, cache in chosen
    )
    assert np.array_equal(first.images, again.images) and not np.array_equal(
        first.images, other.images
    )
    assert first.labels.tolist() == [*range(10), *range(10)]
