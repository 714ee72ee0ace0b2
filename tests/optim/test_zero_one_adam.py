"""0/1 Adam equals its reference; between syncs it sends nothing."""

import warnings

import numpy as np
import pytest
import torch
from helpers.cases import more_of
from helpers.reference_runs import (
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
from helpers.small_runs import make, saved, step
from helpers.zero_one_runs import DOUBLING, EVERY_STEP

import onebit
from onebit import reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity
from onebit.optim.step_sets import step_sets


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
@pytest.mark.parametrize("max_norm, bias_correction", [(5.0, False), *more_of((None, True))])
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
    """T_v = T_u = every step, C[x] = x: u / lr is the mean momentum, and v takes in the mean
    gradient first.
    """
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


@pytest.mark.report("R29")
def test_rounds_and_bits_equal_the_count_of_the_step_sets():
    """Over a whole run: T_v sends an exact average, the rest of T_u one bit an element each
    way, any other step nothing at all.
    """
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


def test_the_variance_freeze_step_is_required_and_options_are_checked():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="variance_freeze_step"):
        onebit.ZeroOneAdam([p], communicator=Single())
    with pytest.raises(ValueError, match="local_step_clipper must be a whole number of at least 1"):
        onebit.ZeroOneAdam([p], variance_freeze_step=3, local_step_clipper=0, communicator=Single())
    with pytest.raises(TypeError, match="did you mean 'variance_freeze_step'"):
        onebit.ZeroOneAdam([p], var_freeze_step=3, communicator=Single())


def test_an_uncompressed_group_is_trained_by_plain_adam_exactly():
    """compress=False: averaged at every step, so that its parameters are the same everywhere,
    and DistributedAdam's, bit for bit.
    """

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


def test_with_a_frozen_variance_and_a_sync_every_step_it_is_onebit_adam():
    """u over its one learning rate is the momentum: m, errors and parameters are those of line
    6 to 13.
    """
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


@pytest.mark.parametrize("small, floor, expected", [(1e-5, 0.0, 1), (1e-5, 1e-3, 0), (0.5, 0.0, 0)])
def test_a_tiny_variance_is_warned_of_once_and_a_floor_cures_it(small, floor, expected):
    p = torch.nn.Parameter(torch.zeros(100))
    optimizer = onebit.ZeroOneAdam(
        [p],
        lr=1e-3,
        variance_freeze_step=2,
        local_step_clipper=1,
        variance_floor=floor,
        bound_steps=False,
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
