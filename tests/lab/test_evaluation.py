"""Evaluation: the mean of the workers' models is judged, and the training does not notice."""

import copy

import pytest
import torch
from helpers.cases import holds_for_each
from helpers.lab_runs import rows, train_in_threads, train_on_rank
from helpers.launch import run_gloo

from onebit.comm import run_threads
from onebit.lab.config import composed
from onebit.lab.report.artifact import load_artifact
from onebit.lab.runs.load import load
from onebit.lab.runs.recorder import COLUMNS, EVALUATION
from onebit.lab.training.evaluate import mean_model
from onebit.lab.training.run import run_from


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(cache, tmp_path):
    """Options of a run of 20 steps, evaluated after 6, 12, 18 and 20, into tmp_path / name."""
    return lambda name, *more: [
        "profile=smoke",
        "experiment=figure_06",
        "task.model.width=4",
        "scale.steps_divisor=490",
        "evaluate_every=6",
        "progress=false",
        "checkpoint_every=5",
        f"cache={cache}",
        f"output={tmp_path / name}",
        *more,
    ]


def evaluation(folder):
    return rows(folder, "evaluation", EVALUATION)


def small_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2).half(), torch.nn.Linear(2, 5).double()
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_model_that_is_evaluated_is_the_exact_mean_over_the_ranks(workers):
    """Parameters and floating-point buffers, in each type; the ranks' own models stay as they
    are.
    """

    def work(communicator):
        with torch.random.fork_rng([]), torch.no_grad():
            model = small_model()
            for number, tensor in enumerate(model.state_dict().values()):
                tensor.copy_(
                    torch.arange(tensor.numel()).view(tensor.shape)
                    + 4 * (number + 1) * communicator.rank
                )
        before = copy.deepcopy(model.state_dict())
        mean = mean_model(model, communicator)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        return before, mean

    results = run_threads(workers, work)
    assert [mean is not None for _, mean in results] == [True] + [False] * (workers - 1)
    states = [state for state, _ in results]
    for name, tensor in results[0][1].state_dict().items():
        terms = torch.stack([state[name] for state in states])
        assert tensor.dtype == terms.dtype
        assert torch.equal(
            tensor,
            terms.double().mean(0).to(tensor.dtype) if tensor.is_floating_point() else terms[0],
        ), name


@pytest.mark.parametrize("optimizer", ["onebit_adam", "local_momentum_sgd"])
def test_training_does_not_notice_that_it_is_evaluated(options, tmp_path, optimizer):
    """Losses, bytes and all: also between two syncs of local steps."""
    for name, more in (("with", "evaluate_every=6"), ("without", "evaluate_every=null")):
        train_in_threads(options(name, "workers=2", f"optimizer={optimizer}", more))
    assert rows(tmp_path / "with", "curve", COLUMNS) == rows(tmp_path / "without", "curve", COLUMNS)
    assert [row["step"] for row in evaluation(tmp_path / "with")] == ["6", "12", "18", "20"]
    assert not (tmp_path / "without/evaluation.csv").exists()


@pytest.mark.parametrize("stop", [4, 14])
def test_a_resumed_run_has_the_evaluations_of_an_uninterrupted_one(options, tmp_path, stop):
    """Stopped before the first checkpoint and between two: rows after the checkpoint are made
    anew, not twice.
    """
    train_in_threads(options("whole", "workers=2"))
    with pytest.raises(KeyboardInterrupt):
        train_in_threads(options("broken", "workers=2"), at_most=stop)
    train_in_threads(options("broken", "workers=2", "resume=true"))
    assert evaluation(tmp_path / "broken") == evaluation(tmp_path / "whole")
    train_in_threads(options("broken", "workers=2", "overwrite=true"))
    assert evaluation(tmp_path / "broken") == evaluation(tmp_path / "whole")


def test_threads_and_gloo_evaluate_alike_bit_for_bit(options, tmp_path):
    chosen = ["workers=3", "optimizer=local_sgd"]
    train_in_threads(options("threads", *chosen))
    run_gloo(3, train_on_rank, options("gloo", *chosen))
    for name, columns in (("curve", COLUMNS), ("evaluation", EVALUATION)):
        assert rows(tmp_path / "gloo", name, columns) == rows(tmp_path / "threads", name, columns)


def test_a_run_learns_what_it_is_evaluated_by(options, tmp_path):
    train_in_threads(
        options(
            "run",
            "workers=1",
            "optimizer=momentum_sgd",
            "scale.steps_divisor=100",
            "task.model.width=8",
            "evaluate_every=98",
        )
    )
    assert float(evaluation(tmp_path / "run")[-1]["value"]) > 30  # of 10 classes


def test_a_smoke_figure_is_drawn_from_runs(options, tmp_path):
    """Of the runs themselves, not made-up ones: rows and evaluations find each other, and the
    paper's curves stand beside them.
    """
    module = load_artifact("figure_13")
    for optimizer in ("adam", "lazy_variance_3"):
        train_in_threads(
            options(
                f"runs/figure_06/smoke/{optimizer}/seed-1", "workers=2", f"optimizer={optimizer}"
            )
        )
    rows = load(tmp_path, "figure_06", "smoke")
    assert rows.test_accuracy.count() == 2 * 4 and rows.loss.count() == 2 * 20
    drawn = module.save("smoke", tmp_path)
    assert drawn == tmp_path / "figures/figure_13_smoke.png" and drawn.exists()


@holds_for_each(
    [
        (
            ["experiment=figure_06", "evaluate_every=7", "record_every=5"],
            "multiple of record_every=5",
        ),
        (["experiment=figure_06", "evaluate_every=0"], "multiple of record_every=1"),
        (["experiment=figure_04", "+evaluate_every=5"], "BertPretraining has nothing to evaluate"),
    ]
)
def test_evaluation_that_cannot_be_is_refused(overrides, error):
    with pytest.raises(ValueError, match=error):
        run_from(composed(["profile=smoke", *overrides]))
