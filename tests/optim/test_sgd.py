"""SGD equals its reference and torch's SGD; what all relatives of SGD have in common."""

import numpy as np
import pytest
import torch
from helpers.cases import holds_for_each, more
from helpers.reference_runs import (
    WORLD_SIZES,
    D,
    gradients_of_all,
    joined,
    local_gradient,
    split,
    start_values,
    steps_on_the_mean_gradient,
)
from helpers.sgd_runs import (
    ALL,
    SGD_GROUPS,
    assert_equals_sgd_reference,
    sgd_reference_options,
    train_sgd,
)
from helpers.small_runs import everything, make, same, step

import onebit
from onebit import reference
from onebit.comm import Single, run_threads


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_sgd_equals_its_reference(ranks, max_norm):
    history = run_threads(
        ranks,
        lambda c: train_sgd(c, onebit.DistributedSGD, SGD_GROUPS, {"max_grad_norm": max_norm}),
    )
    assert_equals_sgd_reference(
        history,
        reference.sgd(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            **sgd_reference_options(SGD_GROUPS),
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_sgd_equals_torch_sgd_on_the_mean_gradient(dtype, max_norm):
    """torch's SGD after DistributedDataParallel sees the mean gradient and clips its norm.

    The arithmetic is the same.
    """
    groups = [dict(group, dampening=0.0) for group in SGD_GROUPS]
    history = run_threads(
        3,
        lambda c: train_sgd(
            c, onebit.DistributedSGD, groups, {"max_grad_norm": max_norm}, dtype=dtype
        ),
    )
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    optimizer = torch.optim.SGD(
        [dict(groups[0], params=params[:3]), dict(groups[1], params=params[3:])]
    )
    for t in steps_on_the_mean_gradient(optimizer, params, groups, dtype, max_norm):
        close = (
            dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
        )
        np.testing.assert_allclose(history[0][t - 1]["x"], joined(params), **close)
        np.testing.assert_allclose(
            history[0][t - 1]["m"],
            joined([optimizer.state[p]["momentum_buffer"] for p in params]),
            **close,
        )


@pytest.mark.parametrize("ranks", [3, *more(2, 4)])
@pytest.mark.parametrize("kind, groups", ALL)
def test_every_rank_holds_the_same_bits_after_every_step_that_syncs(ranks, kind, groups):
    """And between two averages of local SGD it does not."""
    history = run_threads(
        ranks, lambda c: train_sgd(c, kind, groups, steps=24, dtype=torch.float32)
    )
    for t, (first, *others) in enumerate(zip(*history), 1):
        for state in others:
            for name in state.keys() & {"x", "m"}:
                assert np.array_equal(state[name], first[name]) == (
                    kind is not onebit.LocalSGD or t % 4 == 0
                )


@pytest.mark.parametrize(
    "kind, options, calls, sent",
    [
        (onebit.DistributedSGD, {"momentum": 0.9}, 3, 3 * 16 + 2 * 3 * 3264 * 4),
        (onebit.DoubleSqueeze, {}, 3, 3 * 16 + 2 * 3 * 432),
        (onebit.EFMomentumSGD, {}, 3, 3 * 16 + 2 * 3 * 432),
        (onebit.LocalSGD, {"momentum": 0.9}, 1 + 4, 3 * 16 + 2 * 2 * 3 * 3264 * 4),
        (onebit.LocalSGD, {}, 1 + 2, 3 * 16 + 2 * 3 * 3264 * 4),
        (onebit.LocalSGD, {"check_finite": False}, 3, 3 * 16 + 2 * 3 * 3264 * 4),
    ],
)
def test_bytes_of_a_step_are_those_of_its_exchanges(kind, options, calls, sent):
    """Four chunks of 3264 elements, at most three scales in one: a row has 432 bytes, a multiple of
    16 that holds 3264 / 8 + 3 * 4.

    Local SGD sends in every fourth step only.
    """

    def run(communicator):
        run = make(communicator, kind, shapes=((300, 40), (777,)), **options)
        traffic = []
        for t in range(8):
            step(run, t, communicator.rank)
            last = run.optimizer.communication.last_step
            traffic.append((last.calls, last.bytes_sent, last.bytes_received))
        return traffic

    for traffic in run_threads(4, run):
        assert traffic == [
            (calls, sent, sent) if kind is not onebit.LocalSGD or t % 4 == 3 else (0, 0, 0)
            for t in range(8)
        ]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind, groups", ALL)
def test_one_broken_gradient_makes_all_ranks_skip_a_step_that_syncs(kind, groups, bad):
    """Nothing changes, and the next step averages in its place."""

    def run(communicator):
        run = make(communicator, kind, **({"tau": 1} if kind is onebit.LocalSGD else {}))
        for t in range(3):
            step(run, t, communicator.rank)
        before = everything(run)
        step(run, 3, communicator.rank, scale=bad if communicator.rank == 1 else 1.0)
        return same(before, everything(run)), run.optimizer.last_step_skipped, run.optimizer.steps

    assert run_threads(3, run) == [(True, True, 3)] * 3


@pytest.mark.parametrize("kind, groups", ALL)
def test_an_uncompressed_group_is_trained_by_plain_sgd_exactly(kind, groups):
    """compress=False: averaged exactly at every step; nothing of the other groups leaks in.

    Bit for bit.
    """

    def run(communicator, kind, groups, flag):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind(
            [dict(groups[0], params=params[:3]), dict(groups[1], params=params[3:], compress=flag)],
            communicator=communicator,
        )
        for t in range(1, 23):
            for p, g in zip(params, split(local_gradient(t, np.zeros(D), communicator.rank))):
                p.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
        return joined(params[3:]), joined(params[:3])

    exact = run_threads(3, lambda c: run(c, onebit.DistributedSGD, groups, True))
    for mixed, plain in zip(run_threads(3, lambda c: run(c, kind, groups, False)), exact):
        np.testing.assert_array_equal(mixed[0], plain[0])
        assert np.array_equal(mixed[1], plain[1]) == (kind is onebit.DistributedSGD)


@pytest.mark.parametrize("kind, groups", ALL)
def test_bfloat16_parameters_keep_float32_state(kind, groups):
    """The ranks agree wherever they meet, and x is rounded to its own type once a step."""

    def run(communicator):
        run = make(communicator, kind, dtype=torch.bfloat16, lr=0.1)
        for t in range(8):
            step(run, t, communicator.rank)
        assert {
            v.dtype
            for entries in run.optimizer.state_dict()["state"].values()
            for v in entries.values()
        } == {torch.float32}
        return [p.detach() for p in run.params]

    results = run_threads(3, run)
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in results[0])
    assert same(results[0], results[1]) and same(results[0], results[2])


@holds_for_each(
    [
        (
            onebit.DistributedSGD,
            {"momentum": 1.0},
            ValueError,
            r"momentum must be a number in \[0, 1\)",
        ),
        (onebit.DistributedSGD, {"nesterov": True}, TypeError, "leave it out"),
        (onebit.DistributedSGD, {"beta": 0.9}, TypeError, "it takes lr, momentum"),
        (
            onebit.DoubleSqueeze,
            {"momentum": 0.9},
            TypeError,
            "DoubleSqueeze has no option 'momentum'",
        ),
        (onebit.EFMomentumSGD, {"compressor": 3}, TypeError, "compressor must be"),
        (onebit.LocalSGD, {"tau": 0}, ValueError, "tau must be a whole number of at least 1"),
        (onebit.LocalSGD, {"overlap": True}, TypeError, "LocalSGD has no option 'overlap'"),
    ]
)
def test_wrong_options_name_the_remedy(kind, options, error, message):
    with pytest.raises(error, match=message):
        make(Single(), kind, **options)
