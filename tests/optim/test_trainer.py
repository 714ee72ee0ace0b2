"""The example for the Hugging Face Trainer, over two gloo processes: it learns, compresses, clips
by one factor and resumes.
"""

import importlib.util
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from helpers.launch import run_gloo
from helpers.small_runs import same

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hf_trainer.py"
STEPS, WARMUP, SAVE, CLIP = 40, 16, 20, 0.05
Run = namedtuple("Run", "losses phases sent momentum_norms own_norms params errors steps")


def example():
    spec = importlib.util.spec_from_file_location("hf_trainer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norm(tensors):
    return sum(float(x.square().sum()) for x in tensors) ** 0.5


def train(communicator, out, resume=None):
    """One run of the example; what each step was, and what it ends with."""
    rank, size = str(communicator.rank), str(communicator.size)
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }  # as torchrun does
    module = example()
    from transformers import TrainerCallback

    options = module.parse(
        [
            "--out",
            str(out),
            "--steps",
            str(STEPS),
            "--warmup",
            str(WARMUP),
            "--save-steps",
            str(SAVE),
            "--log-steps",
            "4",
            "--max-grad-norm",
            str(CLIP),
            "--cpu",
        ]
    )
    trainer, optimizer = module.make_trainer(options)
    phases, sent, momentum_norms, own_norms = [], [], [], []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            own_norms.append(norm(p.grad for p in trainer.model.parameters()))

        def on_step_end(self, *args, **kwargs):
            phases.append(optimizer.phase)
            sent.append(optimizer.communication.last_step.bytes_sent)
            momentum_norms.append(
                norm(optimizer.state[p]["exp_avg"] for p in trainer.model.parameters())
            )

    trainer.add_callback(Recorder())
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    params = list(trainer.model.parameters())
    return Run(
        losses,
        phases,
        sent,
        momentum_norms,
        own_norms,
        [p.detach().clone() for p in params],
        [optimizer.state[p]["worker_error"].clone() for p in params],
        optimizer.steps,
    )


def straight_and_resumed(communicator, folder):
    straight = train(communicator, Path(folder, "straight"))
    resumed = train(
        communicator,
        Path(folder, "resumed"),
        resume=str(Path(folder, "straight", f"checkpoint-{SAVE}")),
    )
    return straight, resumed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For each rank (a run, one that went on from its checkpoint)."""
    return run_gloo(2, straight_and_resumed, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.report("R60")
def test_the_trainers_loss_falls_and_both_ranks_hold_the_same_bits(runs):
    (ours, _), (theirs, _) = runs
    assert ours.losses[-1] < ours.losses[0] - 1 and ours.steps == STEPS
    assert same(ours.params, theirs.params)


def test_the_trainers_gradients_are_each_ranks_own(runs):
    """Nobody has averaged them before the optimizer does."""
    (ours, _), (theirs, _) = runs
    assert (
        all(a != b for a, b in zip(ours.own_norms, theirs.own_norms, strict=True))
        and len(ours.own_norms) == STEPS
    )


def test_the_trainer_sends_a_thirtieth_after_the_freeze(runs):
    for run, _ in runs:
        assert run.phases == ["warmup"] * (WARMUP - 1) + ["compressed"] * (STEPS - WARMUP + 1)
        assert (
            all(b <= run.sent[0] / 30 for b in run.sent[WARMUP:])
            and len(set(run.sent[:WARMUP])) == 1
        )


def test_the_optimizer_clips_for_the_trainer(runs):
    """||m|| of clipped gradients is at most the bound, and without clipping would be many times
    that.
    """
    for run, _ in runs:
        assert 0.5 * CLIP < max(run.momentum_norms[:WARMUP]) <= CLIP * (1 + 1e-5)


def test_a_run_resumed_from_the_trainers_checkpoint_is_the_run_that_went_on(runs):
    """Rank 0's file serves both ranks, since the callback has synchronized the state before it
    was written.
    """
    for straight, resumed in runs:
        assert (
            resumed.steps == STEPS
            and resumed.losses == straight.losses
            and len(resumed.sent) == STEPS - SAVE
        )
        assert same(straight.params, resumed.params) and same(straight.errors, resumed.errors)
    assert not torch.equal(runs[0][0].errors[0], torch.zeros_like(runs[0][0].errors[0]))
