"""What a saved phase, restart or frozen variance means under other settings."""

import pytest
import torch
from helpers.small_runs import SMALL_SHAPES, make, resumed, saved, step

import onebit
from onebit.comm import Single, run_threads


@pytest.mark.report("R08")
@pytest.mark.parametrize("before, after", [(10, 5), (4, 12)])
def test_the_phase_follows_the_new_setting_after_a_load(before, after):
    """Saved at step 8: T_w lowered below it freezes at once.

    T_w raised above it thaws and freezes anew later.
    """

    def run(communicator):
        run = make(communicator, shapes=SMALL_SHAPES, warmup=before)
        for t in range(8):
            step(run, t, communicator.rank)
        other = resumed(communicator, run.params, saved(run.optimizer), warmup=after)
        phases = []
        for t in range(8, 16):
            phases.append(other.optimizer.phase)
            step(other, t, communicator.rank)
        return phases, [p.detach() for p in other.params]

    for phases, params in run_threads(2, run):
        assert phases == ["compressed"] * 8 if after == 5 else ["warmup"] * 4 + ["compressed"] * 4
        assert all(torch.isfinite(p).all() for p in params)


def frozen_at_20(warmup):
    run = make(Single(), shapes=SMALL_SHAPES, warmup=warmup, betas=(0.9, 0.8))
    for t in range(20):
        step(run, t, 0)
    return run


def test_rolling_back_behind_a_restart_forgets_the_restart():
    run = frozen_at_20(10)
    state = saved(run.optimizer)
    run.optimizer.restart_warmup(50)
    run.optimizer.load_state_dict(state)
    assert run.optimizer.phase == "compressed"


@pytest.mark.parametrize(
    "old, new, phase",
    [
        (
            onebit.VarianceRatio(0.1, min_steps=0),
            onebit.VarianceRatio(0.1, min_steps=1000),
            "warmup",
        ),
        (
            onebit.VarianceRatio(0.1, min_steps=0),
            onebit.VarianceRatio(0.1, min_steps=0),
            "compressed",
        ),
        (onebit.VarianceRatio(0.1, min_steps=0), 200, "warmup"),
    ],
)
def test_a_chosen_freeze_holds_only_under_the_policy_that_chose_it(old, new, phase):
    state = saved(frozen_at_20(old).optimizer)
    other = make(Single(), shapes=SMALL_SHAPES, warmup=new, betas=(0.9, 0.8))
    other.optimizer.load_state_dict(state)
    assert other.optimizer.phase == phase


def test_a_restart_holds_only_under_the_policy_that_it_interrupted():
    run = frozen_at_20(10)
    run.optimizer.restart_warmup(5)
    for warmup, last in ((10, 25), (200, 200)):
        other = make(Single(), shapes=SMALL_SHAPES, warmup=warmup, betas=(0.9, 0.8))
        other.optimizer.load_state_dict(saved(run.optimizer))
        assert other.optimizer.warmup.steps == last


def test_a_frozen_variance_is_not_taken_for_a_raw_one():
    state = saved(frozen_at_20(10).optimizer)
    with pytest.raises(ValueError, match="restart_warmup"):
        make(Single(), onebit.DistributedAdam, shapes=SMALL_SHAPES).optimizer.load_state_dict(state)


def test_errors_are_taken_only_by_the_optimizer_that_made_them():
    """NaiveOneBitAdam's are in units of the gradient, OneBitAdam's of the momentum.

    And a server error belongs to its bucket.
    """
    options = {"shapes": SMALL_SHAPES, "bias_correction": False}
    run = make(Single(), warmup=3, **options)
    for t in range(6):
        step(run, t, 0)
    with pytest.raises(ValueError, match="load it into onebit.OneBitAdam"):
        make(Single(), onebit.NaiveOneBitAdam, **options).optimizer.load_state_dict(
            saved(run.optimizer)
        )
    state = saved(run.optimizer)
    del state["param_groups"][0]["onebit"]["chunks"]
    with pytest.raises(ValueError, match="other buckets"):
        make(Single(), warmup=3, **options).optimizer.load_state_dict(state)


def test_a_state_with_other_groups_is_refused():
    run = make(Single(), shapes=SMALL_SHAPES, warmup=10)
    with pytest.raises(ValueError, match="parameter group"):
        make(Single(), shapes=SMALL_SHAPES[:2], warmup=10).optimizer.load_state_dict(
            run.optimizer.state_dict()
        )
