"""0/1 Adam between two syncs: checkpoints, restarts, learning rates and groups that change.

Nothing is lost.
"""

import io
import math
from functools import partial

import pytest
import torch
from helpers.small_runs import Run, everything, make, same, saved, step
from helpers.zero_one_runs import DOUBLING

import onebit
from onebit.comm import Single, run_threads
from onebit.compression import Quantize
from onebit.optim.step_sets import step_sets


def test_synchronize_brings_the_ranks_together_and_keeps_what_is_owed():
    def run(communicator):
        own = make(communicator, onebit.ZeroOneAdam, shapes=((70,), (9, 15)), **DOUBLING)
        for t in range(19):
            step(own, t, communicator.rank)
        apart = [p.detach().clone() for p in own.params]
        own.optimizer.synchronize()
        together = [p.detach().clone() for p in own.params]
        state = saved(own.optimizer)
        other = make(Single(), onebit.ZeroOneAdam, shapes=((70,), (9, 15)), **DOUBLING)
        other.optimizer.load_state_dict(state)
        step(own, 19, communicator.rank)
        return apart, together, state["state"], own.optimizer.communication

    (a, a2, state, _), (b, b2, other_state, _) = run_threads(2, run)
    assert 19 not in step_sets(30, **DOUBLING)[1]
    assert not any(map(torch.equal, a, b)) and all(map(torch.equal, a2, b2))
    for i in state:
        assert all(torch.equal(value, other_state[i][name]) for name, value in state[i].items())


@pytest.mark.parametrize("at", [3, 11, 19, 26])
@pytest.mark.parametrize("compressor", [None, partial(Quantize, bits=4, stochastic=True)])
def test_a_checkpoint_between_syncs_goes_on_as_if_never_stopped(at, compressor):
    def run(communicator):
        options = {
            "kind": onebit.ZeroOneAdam,
            "shapes": ((70,), (9, 15)),
            "compressor": compressor,
            **DOUBLING,
        }
        straight = make(communicator, **options)
        for t in range(30):
            step(straight, t, communicator.rank)
            if t + 1 == at:
                params, state = (
                    [p.detach().clone() for p in straight.params],
                    saved(straight.optimizer),
                )
        other = make(communicator, **options)
        with torch.no_grad():
            for p, value in zip(other.params, params):
                p.copy_(value)
        other.optimizer.load_state_dict(state)
        for t in range(at, 30):
            step(other, t, communicator.rank)
        return same(everything(straight), everything(other))

    assert all(run_threads(2, run))


def test_a_checkpoint_between_syncs_is_refused_on_another_rank():
    def run(communicator):
        own = make(communicator, onebit.ZeroOneAdam, **DOUBLING)
        for t in range(19):
            step(own, t, communicator.rank)
        buffer = io.BytesIO()
        torch.save(own.optimizer.state_dict(), buffer)
        return buffer.getvalue()

    of_rank_0 = torch.load(io.BytesIO(run_threads(2, run)[0]), weights_only=True)
    for reset_errors in (False, True):
        with pytest.raises(ValueError, match="synchronize\\(\\) before saving"):
            make(Single(), onebit.ZeroOneAdam, **DOUBLING).optimizer.load_state_dict(
                of_rank_0, reset_errors=reset_errors
            )


def test_a_gradient_that_is_not_finite_counts_as_zero_in_a_local_step_and_skips_a_sync_everywhere():
    T_v, T_u = step_sets(40, **DOUBLING)
    local = next(t for t in range(30, 40) if t not in T_u)
    sync = next(t for t in range(30, 40) if t in T_u)

    def run(communicator, bad):
        own = make(communicator, onebit.ZeroOneAdam, **DOUBLING)
        for t in range(1, 41):
            broken = t == bad and communicator.rank == 1
            before = everything(own)
            step(own, t, communicator.rank, scale=float("nan") if broken else 1.0)
            if t == bad:
                outcome = own.optimizer.last_step_skipped, same(before, everything(own))
        own.optimizer.synchronize()
        return outcome, [p.detach() for p in own.params]

    for bad, expected in ((local, (False, False)), (sync, (True, True))):
        (one, p), (other, q) = run_threads(2, lambda c, bad=bad: run(c, bad))
        assert one == other == expected
        assert all(map(torch.equal, p, q)) and all(torch.isfinite(x).all() for x in p)


@pytest.mark.parametrize("options, whole", [({}, False), ({"max_grad_norm": 1e3}, True)])
def test_in_a_local_step_elements_that_are_not_finite_count_as_zero_or_all_if_it_clips(
    options, whole
):
    """The others' momentum moves on by their gradients, unless there is no norm to clip by."""
    momenta = []
    for zeros in (False, True):
        own = make(Single(), onebit.ZeroOneAdam, **DOUBLING, **options)
        local = next(t for t in range(30, 40) if t not in step_sets(40, **DOUBLING)[1])
        for t in range(1, local):
            step(own, t, 0)
        for p in own.params:
            p.grad = torch.ones_like(p)
            p.grad.view(-1)[0] = 0.0 if zeros else math.inf
            if zeros and whole:
                p.grad.zero_()
        own.optimizer.step()
        momenta.append([own.optimizer.state[p]["exp_avg"] for p in own.params])
    assert all(map(torch.equal, *momenta))


def test_a_restart_updates_the_variance_anew():
    own = make(Single(), onebit.ZeroOneAdam, **DOUBLING)
    before = []
    for t in range(60):
        if t == 40:
            own.optimizer.restart_warmup(10)
        step(own, t, 0)
        before.append(own.optimizer.state[own.params[0]]["exp_avg_sq"].clone())
    changed = [t for t in range(1, 60) if not torch.equal(before[t], before[t - 1])]
    assert max(t for t in changed if t < 40) < 20
    assert min(t for t in changed if t >= 40) <= 44 and max(changed) < 50


def test_a_variance_that_was_updated_rarely_is_not_taken_for_adams():
    own = make(Single(), onebit.ZeroOneAdam, **DOUBLING)
    for t in range(20):
        step(own, t, 0)
    own.optimizer.synchronize()
    for kind, options in ((onebit.DistributedAdam, {}), (onebit.OneBitAdam, {"warmup": 30})):
        with pytest.raises(ValueError, match="load it into onebit.ZeroOneAdam"):
            make(Single(), kind, **options).optimizer.load_state_dict(
                own.optimizer.state_dict(), reset_errors=True
            )


SPARSE = {"variance_freeze_step": 5, "local_step_scaler": 1, "local_step_clipper": 16}


def between_syncs(own, t, rank, left):
    """Step until the next sync is `left` steps away; returns the next t."""
    while own.optimizer._run.sets.syncs.due - own.optimizer.steps != left:
        step(own, t, rank)
        t += 1
    return t


def test_a_short_fall_of_the_learning_rate_does_not_make_a_huge_momentum_of_the_errors():
    own = make(
        Single(),
        onebit.ZeroOneAdam,
        shapes=((300,),),
        lr=1e-3,
        variance_freeze_step=10,
        local_step_clipper=1,
    )
    moves = []
    for t in range(60):
        own.optimizer.param_groups[0]["lr"] = 1e-8 if t == 40 else 1e-3
        before = own.params[0].detach().clone()
        step(own, t, 0)
        moves.append(float((own.params[0] - before).abs().max()))
    assert max(moves[41:]) < 2 * max(moves[20:40])


def test_parameters_of_a_group_whose_learning_rate_is_zero_stay():
    def run(communicator):
        params = [torch.nn.Parameter(torch.ones(70)), torch.nn.Parameter(torch.ones(80))]
        optimizer = onebit.ZeroOneAdam(
            [{"params": params[:1]}, {"params": params[1:]}],
            lr=1e-2,
            communicator=communicator,
            **DOUBLING,
        )
        own = Run(params, optimizer)
        for t in range(30):
            optimizer.param_groups[0]["lr"] = 0.0 if t >= 20 else 1e-2
            if t == 20:
                optimizer.synchronize()
                before = params[0].detach().clone()
            step(own, t, communicator.rank)
        optimizer.synchronize()
        return torch.equal(before, params[0]), optimizer.state[params[0]]["exp_avg"].clone()

    (stays, m), (other, m2) = run_threads(2, run)
    assert stays and other and torch.equal(m, m2)


def test_a_restart_between_two_syncs_updates_the_variance_however_long_the_gap():
    own = make(Single(), onebit.ZeroOneAdam, **SPARSE)
    t = between_syncs(own, 60, 0, left=16)
    step(own, t, 0)
    updates = own.optimizer._run.variance_steps
    own.optimizer.restart_warmup(4)
    for later in range(t + 1, t + 20):
        step(own, later, 0)
    assert own.optimizer._run.variance_steps == updates + 4


def test_a_foreign_state_loaded_between_two_syncs_starts_anew():
    own = make(Single(), onebit.ZeroOneAdam, lr=1e-4, **SPARSE)
    adam = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in own.params], lr=1e-4)
    for p in adam.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    adam.step()
    t = between_syncs(own, 60, 0, left=3)
    own.optimizer.load_state_dict(adam.state_dict())
    before = [p.detach().clone() for p in own.params]
    for later in range(t, t + 5):
        step(own, later, 0)
    assert all(torch.allclose(p, x, atol=0.01) for p, x in zip(own.params, before))
    assert own.optimizer._run.variance_steps > 1


def test_a_change_of_requires_grad_between_two_syncs_is_refused_with_the_remedy():
    own = make(Single(), onebit.ZeroOneAdam, **SPARSE)
    t = between_syncs(own, 60, 0, left=3)
    own.params[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="synchronize"):
        step(own, t, 0)
    own.params[0].requires_grad_(True)
    own.optimizer.synchronize()
    own.params[0].requires_grad_(False)
    before = own.params[0].detach().clone()
    for later in range(t, t + 30):
        step(own, later, 0)
    assert torch.equal(before, own.params[0])
