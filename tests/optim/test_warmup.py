"""When the variance is frozen: at a step, by its ratio, anew after restart_warmup.

And what is warned of.
"""

import warnings

import pytest
import torch
from helpers.small_runs import everything, make, same, step

import onebit
from onebit.comm import Single, run_threads


@pytest.mark.report("R25", "R30")
@pytest.mark.parametrize("warmup", [1, 2])
def test_the_shortest_warmups_work_and_warn(warmup):
    run = make(Single(), warmup=warmup)
    with pytest.warns(UserWarning, match="longer warmup"):
        for t in range(10):
            step(run, t, 0)
    assert run.optimizer.phase == "compressed" and all(
        torch.isfinite(x).all() for x in everything(run)
    )


def test_a_variance_that_still_changes_at_the_freeze_warns():
    run = make(Single(), warmup=30, betas=(0.9, 0.9))
    with pytest.warns(UserWarning, match="still changes"):
        for t in range(30):
            step(run, t, 0, scale=1 + t)


def test_a_settled_variance_is_frozen_without_a_warning():
    run = make(Single(), shapes=((5000,),), warmup=60, betas=(0.9, 0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(70):
            step(run, t, 0)


def test_variance_ratio_freezes_at_the_first_step_that_the_rule_allows():
    """Gradients grow until step 40, then stay: the rule, recomputed here from v itself, picks
    the same step on all ranks.
    """
    policy = onebit.VarianceRatio(threshold=0.9, min_steps=15)

    def run(communicator):
        run = make(communicator, shapes=((400,),), warmup=policy, betas=(0.9, 0.9))
        norms = {0: 0.0}
        for t in range(1, 101):
            if run.optimizer.phase == "compressed":
                return t - 1, run.optimizer.warmup.chosen, norms
            step(run, t, communicator.rank, scale=min(t, 40))
            norms[t] = float(run.optimizer.state[run.params[0]]["exp_avg_sq"].double().sum()) / (
                1 - 0.9**t
            )

    for frozen_after, chosen, norms in run_threads(2, run):
        settled = [
            t
            for t in norms
            if t > 15 and norms[t - 10] and 0.9 <= norms[t] / norms[t - 10] <= 1 / 0.9
        ]
        assert frozen_after == chosen == settled[0] and 40 < chosen < 100
    assert policy.chosen is None  # the optimizer keeps its own copy


def chosen(norms, **options):
    """The step at which the rule, with a window of 10 steps, stops for these norms."""
    rule = onebit.VarianceRatio(0.96, min_steps=0, window=10, **options)
    rule.bind(0.9)
    for t, norm in enumerate(norms, 1):
        if rule.wants(t):
            rule.observe(t, norm)
    return rule.chosen


def test_a_rule_that_must_hold_passes_over_the_turn_of_the_variance():
    """A norm that rises by 3 % a step until step 40, falls by 3 % until step 60, and then stays.

    The first hit lies where the rise and the fall within a window cancel out. From step 69 on the
    ratio is settled for good: 0.97 to the power of 1 is the first above 0.96.
    """
    norms = [1.03 ** min(t, 40) * 0.97 ** min(max(t - 40, 0), 20) for t in range(1, 101)]
    assert chosen(norms) == 45
    assert chosen(norms, hold=5) == 69 + 4
    assert chosen(norms, hold=None) == 69 + 9  # a whole window
    assert chosen(norms, hold=1) == chosen(norms)


def test_steps_in_which_the_rule_has_held_are_saved():
    norms = [1.0] * 17
    whole, first = (onebit.VarianceRatio(min_steps=0, window=10, hold=7) for _ in range(2))
    for rule in (whole, first):
        rule.bind(0.9)
    for t in range(1, 15):
        whole.observe(t, norms[t])
        first.observe(t, norms[t])
    resumed = onebit.VarianceRatio(min_steps=0, window=10, hold=7)
    resumed.bind(0.9)
    resumed.load_state_dict(first.state_dict())
    for t in (15, 16, 17):
        whole.observe(t, 1.0)
        resumed.observe(t, 1.0)
    assert whole.chosen == resumed.chosen == 17


def test_a_new_warmup_keeps_what_the_errors_hold():
    """m after = m before + mean worker error + server error; errors are zero; then exact Adam.

    Then compressed again.
    """

    def run(communicator):
        run = make(communicator, shapes=((70,), (129,)), warmup=5, dtype=torch.float64)
        for t in range(12):
            step(run, t, communicator.rank)
        (part,) = run.optimizer._compressed
        before = part.momentum.clone(), *part.errors()
        run.optimizer.restart_warmup(4)
        after = part.momentum.clone(), any(error.any() for error in part.errors())
        phases = []
        for t in range(12, 20):
            phases.append(run.optimizer.phase)
            step(run, t, communicator.rank)
        return before, after, phases, [p.detach() for p in run.params]

    results = run_threads(3, run)
    error = sum(r[0][1] for r in results) / 3 + torch.cat([r[0][2] for r in results])
    for before, after, phases, params in results:
        torch.testing.assert_close(after[0], before[0] + error, rtol=1e-12, atol=1e-14)
        assert not after[1] and phases == ["warmup"] * 4 + ["compressed"] * 4
        assert same(params, results[0][3])


def test_synchronize_keeps_the_total_error_and_makes_ranks_alike():
    def run(communicator):
        run = make(communicator, shapes=((70,), (129,)), warmup=5, dtype=torch.float64)
        for t in range(12):
            step(run, t, communicator.rank)
        (part,) = run.optimizer._compressed
        before = part.errors()
        run.optimizer.synchronize()
        return before, *part.errors()

    results = run_threads(3, run)
    error = sum(r[0][0] for r in results) / 3 + torch.cat([r[0][1] for r in results])
    for _, worker_error, server_error in results:
        torch.testing.assert_close(worker_error, error, rtol=1e-12, atol=1e-14)
        assert not server_error.any() and torch.equal(worker_error, results[0][1])


def test_an_overflowed_variance_raises_at_the_freeze():
    run = make(Single(), warmup=5)
    with pytest.raises(RuntimeError, match="overflowed"):
        for t in range(6):
            step(run, t, 0, scale=1e21 if t == 4 else 1.0)


def test_changing_compress_in_a_new_warmup_keeps_the_bias_correction():
    """A constant gradient: every step of Adam moves by lr, whatever the group was before."""
    for flags in ((True, False), (False, True)):
        params = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
        optimizer = onebit.OneBitAdam(
            [{"params": [params[0]]}, {"params": [params[1]], "compress": flags[0]}],
            lr=1.0,
            warmup=20,
            communicator=Single(),
        )
        for t in range(40):
            if t == 25:
                optimizer.restart_warmup(100)
                optimizer.param_groups[1]["compress"] = flags[1]
            before = params[1].detach().clone()
            for p in params:
                p.grad = torch.ones(8)
            optimizer.step()
            torch.testing.assert_close(
                before - params[1].detach(), torch.ones(8), rtol=2e-3, atol=0
            )


def test_the_variance_ratio_looks_at_compressed_groups_only():
    """A large settled group with compress=False does not hide that the other's variance still
    grows.
    """
    params = [torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(1000))]
    optimizer = onebit.OneBitAdam(
        [{"params": params[:1]}, {"params": params[1:], "compress": False}],
        betas=(0.9, 0.8),
        warmup=onebit.VarianceRatio(min_steps=0),
        communicator=Single(),
    )
    for t in range(60):
        params[0].grad, params[1].grad = torch.full((8,), 1.1**t), torch.ones(1000)
        optimizer.step()
    assert optimizer.phase == "warmup"
