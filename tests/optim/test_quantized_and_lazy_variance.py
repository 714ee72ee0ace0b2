"""What the quantized and the lazy variance have in common: Adam where nothing is lost, and the
family's habits.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.cases import holds_for_each, more
from helpers.reference_runs import (
    GROUPS,
    SHAPES,
    WORLD_SIZES,
    joined,
    local_gradient,
    split,
    start_values,
    train,
)
from helpers.small_runs import everything, make, same, step
from helpers.variance_runs import ODD_SHAPES, QSGD, VARIANTS, adam_on_mean_squares

import onebit
from onebit import LazyVarianceAdam, QuantizedVarianceAdam
from onebit.comm import Single, run_threads
from onebit.compression import Identity, Quantize

LOSSLESS = [
    (QuantizedVarianceAdam, {"compressor": Identity, "variance_compressor": Identity}),
    (LazyVarianceAdam, {"compressor": Identity, "tau": 1}),
    (LazyVarianceAdam, {"compressor": Identity, "tau": 1, "steps_with": "average"}),
]


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("kind, options", LOSSLESS)
def test_without_loss_it_is_adam_on_the_mean_of_the_squared_gradients(ranks, kind, options):
    """Identity sends everything, tau = 1 averages at every step: what is left of both is where
    the square is taken.
    """
    history = run_threads(ranks, lambda c: train(c, kind, options))
    for t, expected in enumerate(adam_on_mean_squares(ranks)):
        for own in history:
            np.testing.assert_allclose(
                own[t]["x"], expected, rtol=1e-9, atol=1e-12, err_msg=f"step {t + 1}"
            )


@pytest.mark.parametrize(
    "kind, options", [*LOSSLESS, (LazyVarianceAdam, {"compressor": Identity, "tau": 7})]
)
def test_with_one_worker_and_without_loss_it_is_adam(kind, options):
    """The mean of one square is the square of the mean, and there is nobody to wait for."""
    history, adam = (
        run_threads(1, lambda c, which=which: train(c, *which))[0]
        for which in ((kind, options), (onebit.DistributedAdam, {}))
    )
    for ours, theirs in zip(history, adam, strict=True):
        for name in "xmv":
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-13)


def bits_of(values):
    return [v.numpy().tobytes() if torch.is_tensor(v) else v.tobytes() for v in values]


@pytest.mark.parametrize("ranks", [3, *more(2)])
@pytest.mark.parametrize(
    "kind, options, ours",
    [
        (QuantizedVarianceAdam, {}, lambda t: "xmv"),
        (LazyVarianceAdam, {"tau": 3}, lambda t: "xmv" if t % 3 == 0 else "m"),
        (
            LazyVarianceAdam,
            {"tau": 3, "steps_with": "average"},
            lambda t: "xmv" if t % 3 == 0 else "xm",
        ),
    ],
)
def test_ranks_hold_the_same_bits_after_an_average_and_differ_where_they_may(
    ranks, kind, options, ours
):
    history = run_threads(ranks, lambda c: train(c, kind, options, 12, torch.float32))
    for t, states in enumerate(zip(*history), 1):
        for name in "xmv":
            assert (len(set(bits_of(state[name] for state in states))) == 1) == (name in ours(t)), (
                t,
                name,
            )


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_an_uncompressed_group_stays_plain_adam_and_overlap_changes_no_bit(kind, options):
    """compress=False is averaged exactly, variance and all, at every step."""

    def run(communicator, kind, flag, **options):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind(
            [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:], **flag)],
            communicator=communicator,
            **options,
        )
        for t in range(1, 12):
            loss = sum(
                (p * torch.tensor(g, dtype=torch.float32)).sum()
                for p, g in zip(
                    params,
                    split(
                        local_gradient(t, np.zeros(sum(map(math.prod, SHAPES))), communicator.rank)
                    ),
                )
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return joined(params[3:]), joined(params)

    plain = run_threads(3, lambda c: run(c, onebit.DistributedAdam, {}))
    late = run_threads(
        3, lambda c: run(c, kind, {"compress": False}, bucket_cap_mb=5e-4, **options)
    )
    early = run_threads(
        3, lambda c: run(c, kind, {"compress": False}, bucket_cap_mb=5e-4, overlap=True, **options)
    )
    for adam, one, other in zip(plain, late, early):
        np.testing.assert_array_equal(one[0], adam[0])
        np.testing.assert_array_equal(one[1], other[1])
        assert not np.array_equal(one[1], adam[1])


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_a_gradient_that_is_not_finite_makes_all_ranks_skip_and_changes_nothing(kind, options):
    def run(communicator):
        run = make(communicator, kind, ODD_SHAPES, **options)
        for t in range(3):
            step(run, t, communicator.rank)
        before = everything(run)
        step(run, 3, communicator.rank, scale=math.nan if communicator.rank == 1 else 1.0)
        unchanged = same(before, everything(run)) and run.optimizer.last_step_skipped
        step(run, 3, communicator.rank)
        return unchanged, run.optimizer.steps, not same(before, everything(run))

    assert run_threads(2, run) == [(True, 4, True)] * 2


@holds_for_each(
    [
        (LazyVarianceAdam, {"tau": 0}, ValueError, "tau.*at least 1"),
        (LazyVarianceAdam, {"tau": 2.5}, ValueError, "whole number"),
        (LazyVarianceAdam, {"steps_with": "mine"}, ValueError, "steps_with must be one of"),
        (LazyVarianceAdam, {"taus": 3}, TypeError, "'tau'"),
        (
            QuantizedVarianceAdam,
            {"variance_compressor": 8},
            TypeError,
            "variance_compressor must be",
        ),
        (
            QuantizedVarianceAdam,
            {"variance_compresor": Identity},
            TypeError,
            "'variance_compressor'",
        ),
        (
            QuantizedVarianceAdam,
            {"compressor": partial(Quantize, bits=3)},
            ValueError,
            "bits among",
        ),
    ]
)
def test_wrong_options_are_refused_with_the_remedy(kind, options, error, message):
    with pytest.raises(error, match=message):
        make(Single(), kind, **options)


@pytest.mark.parametrize(
    "kind, theirs",
    [
        (LazyVarianceAdam, {"tau": 5}),
        (LazyVarianceAdam, {"steps_with": "average"}),
        (QuantizedVarianceAdam, {"variance_compressor": QSGD[16]}),
        (QuantizedVarianceAdam, {"compressor": Identity}),
    ],
)
def test_ranks_with_other_options_raise_at_the_first_step(kind, theirs):
    def run(communicator):
        run = make(communicator, kind, **(theirs if communicator.rank else {}))
        with pytest.raises(RuntimeError, match="the ranks differ"):
            step(run, 0, communicator.rank)
        return True

    assert run_threads(2, run) == [True, True]
