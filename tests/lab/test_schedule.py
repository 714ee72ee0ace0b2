"""Learning rates and phases: the paper's, and the same in a shrunken run."""

import pytest
import torch
from helpers.cases import holds_for_each

from onebit.lab.config import composed
from onebit.lab.training.run import run_from
from onebit.lab.training.schedule import (
    LinearThenDecay,
    LinearWarmupLinearDecay,
    Phase,
    Plan,
    StepDecay,
)


def test_paper_schedule_is_the_papers():
    """Table 2, and linear to 4e-4 over 12.5K steps, then x0.99 every 520."""
    large = run_from(
        composed(["experiment=table_02", "profile=paper", "comm=threads", "workers=64"])
    )
    base = run_from(
        composed(["experiment=table_02_base", "profile=paper", "comm=threads", "workers=64"])
    )
    assert [(p.length, p.steps, p.warmup) for p in large.phases.values()] == [
        (128, 152000, 23000),
        (512, 10000, 1500),
    ]
    assert [(p.length, p.steps, p.warmup) for p in base.phases.values()] == [
        (128, 118000, 16000),
        (512, 22000, 1500),
    ]
    assert {**base.config["task"], "model": None} == {**large.config["task"], "model": None}
    assert (base.batch, base.config["max_grad_norm"], base.phases["seq128"].lr.peak) == (
        4096,
        1.0,
        4e-4,
    )
    assert large.micro_batches(large.phases["seq128"], 64) == (
        4,
        16,
    )  # Table 1: 4 accumulations of 16
    lr = Plan(large.phases).lr
    assert lr(0) == pytest.approx(4e-4 / 12500)
    assert lr(12499) == pytest.approx(4e-4)
    assert lr(12499 + 520) == pytest.approx(4e-4 * 0.99)
    assert lr(12499 + 52000) == pytest.approx(4e-4 * 0.99**100)
    assert lr(152000 + 149) == pytest.approx(1e-5)
    assert lr(152000 + 299) == pytest.approx(1e-5 * 0.90)


def test_a_shrunken_schedule_runs_through_the_same_rates():
    """The t-th step of a run that is 10 times shorter has the rate of the paper's step 10 t."""
    paper = LinearThenDecay(peak=1.0, warmup=12500, decay=0.99, every=520)
    short = LinearThenDecay(peak=1.0, warmup=12500, decay=0.99, every=520, stretch=10)
    assert [short(t - 1) for t in (1, 1250, 1251, 9000)] == [
        paper(10 * t - 1) for t in (1, 1250, 1251, 9000)
    ]


def test_plan_gives_each_step_its_phase():
    phases = {
        name: Phase(
            length=8, steps=steps, warmup=1, micro_batch=1, lr=lambda t, s=steps: s + t / 10
        )
        for name, steps in (("a", 3), ("b", 2))
    }
    plan = Plan(phases)
    assert [plan.at(step)[0] for step in range(5)] == ["a", "a", "a", "b", "b"]
    assert [plan.at(step)[2] for step in range(5)] == [0, 0, 0, 3, 3]
    assert [plan.lr(step) for step in range(5)] == [3.0, 3.1, 3.2, 2.0, 2.1]


def test_a_warm_up_longer_than_the_run_warns():
    assert (
        "T_w = 99 steps" in run_from(composed(["profile=smoke", "warmup_steps=99"])).warnings()[0]
    )
    assert (
        "phase seq512"
        in run_from(
            composed(["profile=smoke", "experiment=table_02", "phases.seq512.warmup=99"])
        ).warnings()[0]
    )
    assert run_from(composed(["profile=smoke"])).warnings() == []
    assert (
        run_from(composed(["profile=smoke", "optimizer=adam", "warmup_steps=99"])).warnings() == []
    )


def test_a_stepped_rate_falls_at_the_same_share_of_a_shrunken_run():
    """x0.1 after 100 of the paper's 200 epochs: 4,900 of 9,800 steps."""
    paper, short = (
        StepDecay(peak=1.0, factor=0.1, every=4900, stretch=stretch) for stretch in (1, 7)
    )
    assert [paper(done) for done in (0, 4899, 4900, 9799)] == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert [short(done) for done in (0, 699, 700, 1399)] == pytest.approx([1.0, 1.0, 0.1, 0.1])


def test_a_linear_rate_equals_that_of_transformers():
    from transformers import get_linear_schedule_with_warmup

    for warmup in (0, 3):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        theirs = get_linear_schedule_with_warmup(optimizer, warmup, 10)
        ours = LinearWarmupLinearDecay(peak=0.5, warmup=warmup, total=10)
        for done in range(12):
            assert theirs.get_last_lr()[0] == pytest.approx(ours(done))
            optimizer.step()
            theirs.step()


@holds_for_each(
    [
        (StepDecay, {"peak": 0.0, "factor": 0.1, "every": 10}),
        (StepDecay, {"peak": 1.0, "factor": "x", "every": 10}),
        (StepDecay, {"peak": 1.0, "factor": 0.1, "every": 0}),
        (LinearWarmupLinearDecay, {"peak": 1.0, "warmup": -1, "total": 10}),
        (LinearWarmupLinearDecay, {"peak": 1.0, "warmup": 10, "total": 10}),
    ]
)
def test_a_schedule_that_cannot_be_is_refused(schedule, options):
    with pytest.raises(ValueError, match="of the learning rate must be"):
        schedule(**options)


def test_lambs_second_phase_has_half_of_the_batch_and_counts_its_samples():
    """65,536 examples in each of 5,993 steps, then 32,768 in each of 555."""
    run = run_from(composed(["experiment=lamb_512", "profile=paper", "workers=64"]))
    plan = Plan(run.phases)
    assert run.micro_batches(run.phases["seq128"], 64) == (16, 64)
    assert run.micro_batches(run.phases["seq512"], 64) == (32, 16)
    assert plan.samples(5993, run.batch) == 5993 * 65536
    assert plan.samples(6548, run.batch) == 5993 * 65536 + 555 * 32768
    peak = plan.lr(5993 + 149)
    assert peak == pytest.approx(2e-3, rel=1e-5) and plan.lr(6547) < peak
