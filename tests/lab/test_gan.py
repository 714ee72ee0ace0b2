"""Two players: they take turns, are recorded together and resumed together.

DCGAN, its images and their distance.
"""

import io
import json
import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.lab_runs import rows, train_in_threads
from matplotlib.image import imread
from PIL import Image

from onebit.lab.config import composed
from onebit.lab.report.artifact import load_artifact
from onebit.lab.runs.recorder import COLUMNS, EVALUATION, Recorder
from onebit.lab.tasks.dcgan import Dcgan, discriminator, generator, scaled, sliced_wasserstein
from onebit.lab.tasks.faces import Faces
from onebit.lab.tasks.pictures import HubImages, load_pictures
from onebit.lab.training.loop import seed_torch, train
from onebit.lab.training.run import run_from


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(cache, tmp_path):
    """Options of a run of 12 steps, T_w = 2, evaluated after 6 and 12, into tmp_path / name."""
    return lambda name, *more: [
        "profile=smoke",
        "experiment=figure_08",
        "scale.steps_divisor=666",
        "evaluate_every=6",
        "batch=12",
        "task.train.count=100",
        "task.test.count=64",
        "progress=false",
        "checkpoint_every=5",
        f"cache={cache}",
        f"output={tmp_path / name}",
        *more,
    ]


def metric(folder, name):
    return [
        float(row["value"])
        for row in rows(folder, "evaluation", EVALUATION)
        if row["metric"] == name
    ]


@pytest.fixture(scope="module")
def small(cache):
    faces = {"train": Faces(count=60, side=16, seed=0), "test": Faces(count=20, side=16, seed=1)}
    return Dcgan(model={"noise": 6, "width": 4}, **faces, batch=12, size=16, cache=cache)


def gradients(small, name):
    """Of the player's loss at a model and a batch that are the same at each call: {parameter:
    gradient or None}.
    """
    torch.manual_seed(0)
    model = small.model()
    _, loss = small.players(model)[name]
    loss(model, small.batch(0, 0, 0, 12, 1)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("player", ["discriminator", "generator"])
def test_a_players_loss_gives_gradients_to_its_own_parameters_only(small, player):
    found = gradients(small, player)
    assert {name.partition(".")[0] for name, gradient in found.items() if gradient is not None} == {
        player
    }
    assert all(gradient.abs().sum() > 0 for gradient in found.values() if gradient is not None)


def test_the_losses_are_the_logarithms_of_the_papers_equations(small):
    torch.manual_seed(0)
    model, batch = small.model(), small.batch(0, 0, 0, 12, 1)
    real = torch.sigmoid(model["discriminator"](batch["images"]))
    generated = torch.sigmoid(model["discriminator"](model["generator"](batch["noise"])))
    assert small.discriminator_loss(model, batch).item() == pytest.approx(
        (-real.log().mean() - (1 - generated).log().mean()).item(), rel=1e-5
    )
    assert small.loss(model, batch).item() == pytest.approx(
        -generated.log().mean().item(), rel=1e-5
    )


def test_two_players_take_turns_as_with_two_optimizers_of_torch(options, tmp_path):
    """The generator meets the discriminator after its step: losses as of a plain loop over two
    of torch's SGD, whose rates halve every 4 steps.
    """
    arguments = options(
        "run",
        "workers=1",
        "optimizer=sgd",
        "+scale.sgd_lr=0.05",
        "phases.train.lr.factor=0.5",
        "phases.train.lr.every=2664",
    )
    train_in_threads(arguments)
    task = run_from(composed(arguments)).task
    seed_torch(torch.device("cpu"), 1)
    model = task.model().train()
    in_order = (("discriminator", task.discriminator_loss), ("generator", task.loss))
    players = [
        (name, loss, torch.optim.SGD(model[name].parameters(), lr=0.05)) for name, loss in in_order
    ]
    losses = {name: [] for name, _ in in_order}
    for step in range(12):
        batch = task.batch(1, step, 0, 12, 1)
        for name, loss, optimizer in players:
            optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** (step // 4)
            optimizer.zero_grad()
            value = (
                sum(
                    loss(model, {key: tensor[part] for key, tensor in batch.items()})
                    for part in (slice(0, 6), slice(6, 12))
                )
                / 2
            )
            value.backward()
            optimizer.step()
            losses[name].append(value.item())
    for name, values in losses.items():
        assert metric(tmp_path / "run", f"loss_{name}") == pytest.approx(values, rel=1e-4)
    total = [float(row["loss"]) for row in rows(tmp_path / "run", "curve", COLUMNS)]
    assert total == pytest.approx(
        [sum(pair) for pair in zip(*losses.values(), strict=True)], rel=1e-4
    )


@pytest.mark.parametrize("stop", [3, 8])
def test_a_resumed_run_goes_on_with_both_players(options, tmp_path, stop):
    """Stopped in the warm-up before the first checkpoint, and in the compressed stage between
    two.
    """
    train_in_threads(options("whole", "workers=2"))
    with pytest.raises(KeyboardInterrupt):
        train_in_threads(options("broken", "workers=2"), stop)
    train_in_threads(options("broken", "workers=2", "resume=true"))
    for name, columns in (("curve", COLUMNS), ("evaluation", EVALUATION)):
        assert rows(tmp_path / "broken", name, columns) == rows(tmp_path / "whole", name, columns)
    assert (tmp_path / "broken/samples.png").read_bytes() == (
        tmp_path / "whole/samples.png"
    ).read_bytes()


def test_a_run_that_was_stopped_behind_its_last_checkpoint_is_finished_by_resuming_it(
    options, tmp_path, monkeypatch
):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Recorder, "finish", stopped)
        train_in_threads(options("run", "workers=2"))
    before = rows(tmp_path / "run", "curve", COLUMNS)
    train_in_threads(options("run", "workers=2", "resume=true"))
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["final"]["step"]) == ("finished", 12)
    assert (
        str(record["final"]["bytes_sent"]) == before[-1]["bytes_sent"]
        and rows(tmp_path / "run", "curve", COLUMNS) == before
    )


@pytest.mark.parametrize("player", ["discriminator_loss", "loss"])
def test_a_run_has_diverged_if_one_of_its_players_has(options, tmp_path, player):
    """Its loss is not a number from the seventh of 24 micro-batches on."""
    run = run_from(composed(options("run", "workers=1", "optimizer=adam", "comm=threads")))
    right = getattr(run.task, player)
    calls = iter(range(1000))
    setattr(
        run.task,
        player,
        lambda model, batch: right(model, batch) * (math.nan if next(calls) >= 6 else 1),
    )
    run.comm.run(partial(train, run))
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "diverged"


def test_traffic_and_skipped_steps_are_those_of_both_players(options, tmp_path):
    """Of two workers with Adam, each sends half of both networks twice, in 32 bits, in each of
    12 steps.
    """
    train_in_threads(options("run", "workers=2", "optimizer=adam"))
    size = sum(
        parameter.numel()
        for parameter in run_from(composed(options("unused"))).task.model().parameters()
    )
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["final"]["bytes_sent"] == pytest.approx(
        12 * 4 * size, rel=0.05
    )  # padding and flags, too
    assert record["final"]["skipped_steps"] == 0
    assert (
        int(rows(tmp_path / "run", "curve", COLUMNS)[-1]["bytes_sent"])
        == record["final"]["bytes_sent"]
    )


def test_variance_norms_are_those_of_one_vector_of_all_players_parameters():
    class Optimizer:
        vectors = ("variance",)
        param_groups = [{"betas": (0.9, 0.5)}]

        def __init__(self, *norms):
            self.variance_norms = lambda: norms

    recorder = Recorder.__new__(Recorder)
    recorder.norms = {3: 4.0}
    assert recorder._variance([Optimizer(7.0, 3.0), Optimizer(9.0, 4.0)], 5) == {
        "variance_l1": 16.0,
        "variance_l2": 5.0,
        "variance_ratio": 4.0,
    }


def test_the_networks_are_radfords():
    """Both networks for 64x64 pixels have the known numbers of parameters.

    All begin with deviation 0.02.
    """
    with torch.device("meta"):
        players = generator(noise=100, width=64, side=64), discriminator(width=64, side=64)
    assert [sum(p.numel() for p in player.parameters()) for player in players] == [
        3_576_704,
        2_765_568,
    ]
    torch.manual_seed(0)
    model = Dcgan(
        model={"noise": 100, "width": 16}, train=None, test=None, batch=1, size=32, cache=""
    ).model()
    for parameter in model.parameters():
        if parameter.ndim == 4:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
    scales = torch.cat(
        [module.weight for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    )
    assert (scales.mean().item(), scales.std().item()) == (
        pytest.approx(1, abs=0.01),
        pytest.approx(0.02, rel=0.2),
    )
    images = model["generator"](torch.randn(3, 100))
    assert images.shape == (3, 3, 32, 32) and images.abs().max() <= 1
    assert model["discriminator"](images).shape == (3,)


@pytest.mark.parametrize("side", [4, 24, 33])
def test_a_side_that_no_doubling_reaches_is_refused(side):
    with pytest.raises(ValueError, match="set task.size"):
        generator(noise=4, width=4, side=side)


def test_an_epoch_shows_each_face_once_and_the_workers_have_noise_of_their_own(small):
    parts = [small.batch(3, step, rank, 6, 1) for step in range(5) for rank in range(2)]
    seen = torch.cat([part["images"] for part in parts]).flatten(1)
    faces = scaled(small.train.images).flatten(1)
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, faces.tolist()))
    assert seen.min() >= -1 and seen.max() <= 1
    noise = torch.cat([part["noise"] for part in parts])
    assert len({tuple(z) for z in noise.tolist()}) == 60
    assert torch.equal(noise[-6:], small.batch(3, 4, 1, 6, 1)["noise"])


def test_the_distance_of_numbers_is_the_mean_distance_in_their_order():
    ones, others = torch.tensor([[5.0], [0.0], [1.0]]), torch.tensor([[2.0], [9.0], [4.0]])
    assert sliced_wasserstein(ones, others) == pytest.approx((2 + 3 + 4) / 3)
    assert sliced_wasserstein(ones, ones.flip(0)) == 0


def test_the_distance_of_shifted_points_is_the_mean_shift_along_a_direction():
    """E|v d| = |v| sqrt(2 / (pi n)) for a unit vector d in n dimensions, nearly."""
    points = torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert sliced_wasserstein(points, points + 0.5) == pytest.approx(
        0.5 * 192**0.5 * (2 / (math.pi * 192)) ** 0.5, rel=0.15
    )


def test_the_distance_grows_if_the_images_are_all_one():
    real, other = (
        scaled(np.stack([image for image, _ in Faces(count=200, side=16, seed=seed).pictures()]))
        for seed in (0, 1)
    )
    assert 3 * sliced_wasserstein(real, other) < sliced_wasserstein(
        real, other[:1].expand(200, -1, -1, -1)
    )


def test_faces_are_the_same_at_each_call_and_differ_by_seed():
    first, again, other = (
        np.stack([image for image, _ in Faces(count=4, side=16, seed=seed).pictures()])
        for seed in (0, 0, 1)
    )
    assert first.shape == (4, 16, 16, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len(np.unique(first.reshape(4, -1), axis=0)) == 4


def test_samples_show_the_generator_on_a_noise_that_is_the_same_in_all_runs(small, tmp_path):
    torch.manual_seed(0)
    model = small.model()
    small.illustrate(model, torch.device("cpu"), tmp_path)
    picture = imread(tmp_path / "samples.png")
    assert picture.shape == (8 * 16, 8 * 16, 3)
    expected = (
        small.generated(model, torch.device("cpu"), 64)[8].permute(1, 2, 0).numpy()
    )  # the first of the second row
    assert np.allclose(picture[16:32, :16], (expected + 1) / 2, atol=1 / 255)


def test_the_middle_of_celebas_photographs_is_read(tmp_path):
    """Schema and size of the hub's: image, celeb_id; 178x218 pixels."""
    photograph = np.random.default_rng(0).integers(256, size=(218, 178, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(photograph).save(file, "PNG")
    (tmp_path / "celeba").mkdir()
    pd.DataFrame([{"image": {"bytes": file.getvalue(), "path": None}, "celeb_id": 7}]).to_parquet(
        tmp_path / "celeba/train.parquet"
    )
    there = {
        "name": "celeba",
        "path": "flwrlabs/celeba",
        "split": "train",
        "image": "image",
        "label": "celeb_id",
        "title": "CelebA",
    }
    source = HubImages(**there, crop=128, data_root=str(tmp_path))
    expected = photograph[45:173, 25:153].reshape(64, 2, 64, 2, 3).mean((1, 3))
    assert np.abs(load_pictures(source, 64, tmp_path / "cache").images[0] - expected).max() <= 0.5
    with pytest.raises(ValueError, match="no square of crop=200"):
        next(HubImages(**there, crop=200, data_root=str(tmp_path)).pictures())


def test_too_few_faces_are_refused(cache):
    train, test = (Faces(count=count, side=8, seed=count) for count in (10, 11))
    few = Dcgan(
        model={"noise": 4, "width": 4}, train=train, test=test, batch=4, size=8, cache=cache
    )
    with pytest.raises(ValueError, match="has 10 images: too few"):
        few.prepare()


def test_the_papers_faces_are_trained_as_radford_says():
    """Rate 2e-4 throughout, beta_1 = 0.5, batches of 128.

    Of the paper are the steps and T_w = 20 % of them. Other experiments keep beta_1 = 0.9.
    """
    for optimizer in ("adam", "onebit_adam"):
        run = run_from(
            composed(
                [
                    "experiment=figure_08",
                    "profile=paper",
                    f"optimizer={optimizer}",
                    "workers=8",
                    "comm=threads",
                ]
            )
        )
        phase = run.phases["train"]
        assert (phase.steps, phase.warmup, run.micro_batches(phase, 8)) == (8000, 1600, (1, 16))
        assert {phase.lr(done) for done in (0, 1600, 7999)} == {2e-4}
        assert (run.optimizer.keywords["betas"], run.optimizer.keywords["weight_decay"]) == (
            [0.5, 0.999],
            0.0,
        )
    other = run_from(
        composed(
            ["experiment=figure_06", "profile=paper", "optimizer=adam", "workers=8", "comm=threads"]
        )
    )
    assert (other.optimizer.keywords["betas"], other.optimizer.keywords["weight_decay"]) == (
        [0.9, 0.999],
        0.01,
    )


def test_a_smoke_figure_is_drawn_from_runs(options, tmp_path):
    for optimizer in ("adam", "onebit_adam"):
        train_in_threads(
            options(
                f"runs/figure_08/smoke/{optimizer}/seed-1", "workers=2", f"optimizer={optimizer}"
            )
        )
    drawn = load_artifact("figure_08").save("smoke", tmp_path)
    assert drawn == tmp_path / "figures/figure_08_smoke.png" and drawn.exists()
