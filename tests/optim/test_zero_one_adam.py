"""0/1 Adam equals its reference; its step sets are what the README says; between syncs nothing is sent and nothing is lost."""

import io
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from test_behaviour import Run, everything, make, same, step
from test_checkpoint import saved
from test_optimizers import (
    GROUPS,
    STEPS,
    WORLD_SIZES,
    gradients_of_all,
    joined,
    learning_rate,
    local_gradient,
    reference_options,
    segments,
    server_error,
    split,
    start_values,
)

import onebit
from onebit import reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity, Quantize
from onebit.optim.intervals import step_sets

EVERY_STEP = {
    "variance_freeze_step": STEPS,
    "variance_update_scaler": STEPS,
    "local_step_clipper": 1,
}
DOUBLING = {
    "variance_freeze_step": 20,
    "variance_update_scaler": 3,
    "local_step_scaler": 6,
    "local_step_clipper": 4,
}


# ---- the step sets


def test_gaps_of_variance_updates_double_after_kappa_updates_until_the_freeze():
    T_v, T_u = step_sets(
        40, variance_freeze_step=30, variance_update_scaler=3, local_step_clipper=1
    )
    assert sorted(T_v) == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 30]
    assert T_u == set(range(1, 41))


def test_gaps_of_syncs_double_after_so_many_syncs_and_are_clipped():
    T_v, T_u = step_sets(30, variance_freeze_step=1, local_step_scaler=3, local_step_clipper=4)
    assert T_v == {1}
    assert sorted(T_u) == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 26, 30]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_a_scaler_of_one_makes_the_interval_constant_once_it_has_grown(interval):
    _, T_u = step_sets(60, variance_freeze_step=1, local_step_scaler=1, local_step_clipper=interval)
    assert set(np.diff(sorted(T_u))[4:]) == {interval}


def test_variance_changes_only_right_after_a_sync_and_that_step_syncs():
    T_v, T_u = step_sets(
        400,
        variance_freeze_step=300,
        variance_update_scaler=4,
        local_step_scaler=10,
        local_step_clipper=8,
    )
    assert max(T_v) <= 300 and len(T_v) > 8
    assert all(t == 1 or t - 1 in T_u for t in T_v) and T_v <= T_u
    assert T_u - T_v and set(range(1, 401)) - T_u


# ---- the reference


def train_zero_one(communicator, options, steps=STEPS, dtype=torch.float64, lr=learning_rate):
    """As `train`, with the accumulator and with learning rates that may be 0."""
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    optimizer = onebit.ZeroOneAdam(
        [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:])],
        communicator=communicator,
        **options,
    )
    history = []
    for t in range(1, steps + 1):
        for group, own in zip(optimizer.param_groups, GROUPS):
            group["lr"] = lr(own["lr"], t)
        for p, g in zip(params, split(local_gradient(t, joined(params), communicator.rank))):
            p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        names = {"m": "exp_avg", "v": "exp_avg_sq", "u": "accumulator", "delta": "worker_error"}
        state = {
            key: joined([optimizer.state[p][name] for p in params]) for key, name in names.items()
        }
        traffic = optimizer.communication.last_step
        history.append(
            state
            | {
                "x": joined(params),
                "server_error": optimizer.state[params[0]]["server_error"].numpy().copy(),
                "traffic": traffic,
            }
        )
    return history


def local_gradients(ranks):
    """Each worker's gradient at its own parameters, x [n, d]."""
    return lambda t, x: np.stack([local_gradient(t, x[rank], rank) for rank in range(ranks)])


def assert_equals(history, generator, ranks):
    for t, expected in zip(range(len(history[0])), generator):
        close = {"rtol": 1e-9, "atol": 1e-12, "err_msg": f"step {t + 1}"}
        for rank in range(ranks):
            state = history[rank][t]
            for name in ("x", "m", "u", "delta"):
                np.testing.assert_allclose(state[name], getattr(expected, name)[rank], **close)
            np.testing.assert_allclose(state["v"], expected.v, **close)
        np.testing.assert_allclose(
            server_error(history, t, ranks), expected.delta_bar, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "compressor, C", [(None, reference.one_bit), (Identity, reference.identity)]
)
@pytest.mark.parametrize("max_norm, bias_correction", [(None, True), (5.0, False)])
@pytest.mark.parametrize("sets", [EVERY_STEP, DOUBLING])
def test_zero_one_adam_equals_its_reference(ranks, compressor, C, max_norm, bias_correction, sets):
    options = {
        "compressor": compressor,
        "max_grad_norm": max_norm,
        "bias_correction": bias_correction,
    }
    history = run_threads(ranks, lambda c: train_zero_one(c, sets | options))
    T_v, T_u = step_sets(STEPS, **sets)
    assert_equals(
        history,
        reference.zero_one_adam(
            joined(start_values()),
            local_gradients(ranks),
            ranks,
            groups=segments(ranks),
            T_v=T_v,
            T_u=T_u,
            C=C,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
        ranks,
    )


def test_while_the_learning_rate_is_zero_momentum_and_variance_go_on_and_parameters_stay():
    def lr(own, t):
        return 0.0 if t < 4 else own

    options = reference_options()
    rates = options["gamma"](10**6)
    options["gamma"] = lambda t: 0.0 * rates if t < 4 else rates
    history = run_threads(2, lambda c: train_zero_one(c, DOUBLING, lr=lr))
    T_v, T_u = step_sets(STEPS, **DOUBLING)
    assert all(np.array_equal(h[t]["x"], joined(start_values())) for h in history for t in range(3))
    assert_equals(
        history,
        reference.zero_one_adam(
            joined(start_values()),
            local_gradients(2),
            2,
            groups=segments(2),
            T_v=T_v,
            T_u=T_u,
            **options,
        ),
        2,
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_syncing_every_step_without_compression_is_distributed_adam(ranks):
    """T_v = T_u = every step, C[x] = x: u / lr is the mean momentum, and v takes in the mean gradient first."""
    history = run_threads(ranks, lambda c: train_zero_one(c, EVERY_STEP | {"compressor": Identity}))
    adam = reference.adam(
        joined(start_values()), gradients_of_all(ranks), ranks, **reference_options()
    )
    for t, expected in zip(range(STEPS), adam):
        for name in "xmv":
            np.testing.assert_allclose(
                history[0][t][name], getattr(expected, name), rtol=1e-9, atol=1e-12
            )


def test_after_a_sync_all_ranks_hold_the_same_bits_and_between_syncs_they_do_not():
    history = run_threads(3, lambda c: train_zero_one(c, DOUBLING, dtype=torch.float32))
    _, T_u = step_sets(STEPS, **DOUBLING)
    for t in range(STEPS):
        for name in "xmv":
            equal = all(np.array_equal(h[t][name], history[0][t][name]) for h in history)
            assert equal == (t + 1 in T_u or name == "v")


# ---- traffic


def test_rounds_and_bits_equal_the_count_of_the_step_sets():
    """Over a whole run: T_v sends an exact average, the rest of T_u one bit an element each way, any other step nothing at all."""
    steps, n, ranks = 120, 2**18, 4
    sets = {
        "variance_freeze_step": 30,
        "variance_update_scaler": 3,
        "local_step_scaler": 20,
        "local_step_clipper": 4,
    }
    T_v, T_u = step_sets(steps, **sets)

    def run(communicator):
        p = torch.nn.Parameter(torch.zeros(n))
        optimizer = onebit.ZeroOneAdam([p], lr=1e-3, communicator=communicator, **sets)
        history = []
        for t in range(steps):
            p.grad = torch.randn(
                n, generator=torch.Generator().manual_seed(10 * t + communicator.rank)
            )
            optimizer.step()
            history.append(optimizer.communication.last_step)
        return history, optimizer.communication.bytes_sent

    for history, total in run_threads(ranks, run):
        share = (
            2 * (ranks - 1) / ranks * n
        )  # elements that leave a rank in an exact or compressed average
        assert {t + 1 for t, traffic in enumerate(history) if traffic.calls} == T_u
        assert all(traffic.bytes_sent == 0 for t, traffic in enumerate(history) if t + 1 not in T_u)
        assert total == pytest.approx(share * (len(T_u - T_v) / 8 + 4 * len(T_v)), rel=0.02)


# ---- between steps


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
        (one, p), (other, q) = run_threads(2, lambda c: run(c, bad))  # noqa: B023
        assert one == other == expected
        assert all(map(torch.equal, p, q)) and all(torch.isfinite(x).all() for x in p)


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


def test_the_variance_freeze_step_is_required_and_options_are_checked():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="variance_freeze_step"):
        onebit.ZeroOneAdam([p], communicator=Single())
    with pytest.raises(ValueError, match="local_step_clipper must be a whole number of at least 1"):
        onebit.ZeroOneAdam([p], variance_freeze_step=3, local_step_clipper=0, communicator=Single())
    with pytest.raises(TypeError, match="did you mean 'variance_freeze_step'"):
        onebit.ZeroOneAdam([p], var_freeze_step=3, communicator=Single())


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


def test_an_uncompressed_group_is_trained_by_plain_adam_exactly():
    """compress=False: averaged at every step, so that its parameters are the same everywhere, and DistributedAdam's, bit for bit."""

    def run(communicator, kind, options, flag):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind(
            [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:], **flag)],
            communicator=communicator,
            **options,
        )
        for t in range(1, 41):
            for p, g in zip(
                params, split(local_gradient(t, np.zeros(len(joined(params))), communicator.rank))
            ):
                p.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
        return joined(params[3:])

    exact = run_threads(3, lambda c: run(c, onebit.DistributedAdam, {}, {}))
    mixed = run_threads(3, lambda c: run(c, onebit.ZeroOneAdam, DOUBLING, {"compress": False}))
    assert all(np.array_equal(a, b) for a, b in zip(exact, mixed))


# ---- groups, learning rates and states that change on the way

SPARSE = {"variance_freeze_step": 5, "local_step_scaler": 1, "local_step_clipper": 16}


def between_syncs(own, t, rank, left):
    """Step until the next sync is `left` steps away; returns the next t."""
    while own.optimizer._sets.syncs.due - own.optimizer.steps != left:
        step(own, t, rank)
        t += 1
    return t


def test_with_a_frozen_variance_and_a_sync_every_step_it_is_onebit_adam():
    """u over its one learning rate is the momentum: m, errors and parameters are those of line 6 to 13."""
    adam = make(
        Single(),
        onebit.DistributedAdam,
        shapes=((70,), (9, 15)),
        dtype=torch.float64,
        bias_correction=False,
    )
    for t in range(5):
        step(adam, t, 0)

    def run(communicator, kind, options):
        own = make(
            communicator,
            kind,
            shapes=((70,), (9, 15)),
            dtype=torch.float64,
            bias_correction=False,
            **options,
        )
        with torch.no_grad():
            for p, value in zip(own.params, adam.params):
                p.copy_(value)
        own.optimizer.load_state_dict(saved(adam.optimizer))
        for t in range(5, 25):
            step(own, t, communicator.rank)
        state = own.optimizer.state
        return [
            torch.cat([p.detach().flatten() for p in own.params]),
            *(
                torch.cat([state[p][name].flatten() for p in own.params])
                for name in ("exp_avg", "exp_avg_sq", "worker_error")
            ),
        ]

    for ours, theirs in zip(
        run_threads(
            3,
            lambda c: run(
                c, onebit.ZeroOneAdam, {"variance_freeze_step": 1, "local_step_clipper": 1}
            ),
        ),
        run_threads(3, lambda c: run(c, onebit.OneBitAdam, {"warmup": 5})),
    ):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


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


def test_a_late_gradient_is_warned_of_once_the_variance_is_frozen():
    own = make(
        Single(), onebit.ZeroOneAdam, shapes=((70,),), variance_freeze_step=5, local_step_clipper=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(6):
            own.params[0].grad = torch.ones(70)
            own.params[0].grad[:10] = 0.0
            own.optimizer.step()
    own.params[0].grad = torch.ones(70)
    with pytest.warns(
        UserWarning, match="masked and do not train. Put them in a group with compress=False"
    ):
        own.optimizer.step()


def test_a_restart_between_two_syncs_updates_the_variance_however_long_the_gap():
    own = make(Single(), onebit.ZeroOneAdam, **SPARSE)
    t = between_syncs(own, 60, 0, left=16)
    step(own, t, 0)
    updates = own.optimizer._variance_steps
    own.optimizer.restart_warmup(4)
    for later in range(t + 1, t + 20):
        step(own, later, 0)
    assert own.optimizer._variance_steps == updates + 4


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
    assert own.optimizer._variance_steps > 1


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


@pytest.mark.parametrize("small, floor, expected", [(1e-5, 0.0, 1), (1e-5, 1e-3, 0), (0.5, 0.0, 0)])
def test_a_tiny_variance_is_warned_of_once_and_a_floor_cures_it(small, floor, expected):
    p = torch.nn.Parameter(torch.zeros(100))
    optimizer = onebit.ZeroOneAdam(
        [p],
        lr=1e-3,
        variance_freeze_step=2,
        local_step_clipper=1,
        variance_floor=floor,
        communicator=Single(),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            p.grad = torch.ones(100)
            p.grad[3] = small
            optimizer.step()
    assert sum("1 coordinates" in str(w.message) for w in caught) == expected
    assert (float(p.detach().abs().max()) > 0.05) == bool(expected)
