"""LAMB equals its reference, and Adam where its coefficient is 1."""

import math

import pytest
import torch
from helpers.lamb_runs import (
    BOUNDS,
    TENSORS,
    assert_all_equal_reference,
    assert_same_bits,
    histories,
    lamb_state,
    numbers,
)
from helpers.reference_runs import (
    WORLD_SIZES,
    gradients_of_all,
    joined,
    reference_options,
    start_values,
    train,
)
from helpers.small_runs import make, saved, step

import onebit
from onebit import reference
from onebit.comm import Single, run_threads


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_lamb_equals_its_reference(ranks, bias_correction, max_norm):
    options = {
        "bias_correction": bias_correction,
        "max_grad_norm": max_norm,
        "coefficient_bounds": BOUNDS,
    }
    history = run_threads(ranks, lambda c: train(c, onebit.Lamb, options, more=lamb_state))
    assert len({*history[0][-1]["c"]}) > 3  # not all at the bounds
    assert_all_equal_reference(
        history,
        reference.lamb(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            tensors=TENSORS,
            c_bounds=BOUNDS,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_with_ratio_1_equals_adam_bit_for_bit(dtype):
    """c = 1 leaves lr as it is, and the update is Adam's own kernel."""
    clipped = {"max_grad_norm": 5.0}
    assert_same_bits(
        histories(3, onebit.DistributedAdam, clipped, dtype),
        histories(3, onebit.Lamb, clipped | {"coefficient_bounds": (1, 1)}, dtype),
    )


def test_a_coefficient_is_the_ratio_of_norms_within_its_bounds():
    """One step from m = v = 0 without bias correction, g = 1: u = 0.1 / sqrt(0.001).

    c = ||x|| / ||u||, clipped; 1 where x = 0 or g = 0.
    """
    params = [
        torch.nn.Parameter(torch.full((50,), value)) for value in (1.0, 1e-3, 100.0, 0.0, 1.0)
    ]
    optimizer = onebit.Lamb(
        params, lr=0.1, bias_correction=False, coefficient_bounds=(0.01, 2.0), communicator=Single()
    )
    for p in params:
        p.grad = torch.ones(50)
    params[4].grad = None
    optimizer.step()
    u = 0.1 / math.sqrt(0.001)
    expected = [1 / u, 0.01, 2.0, 1.0, 1.0]
    assert [float(optimizer.state[p]["coefficient"]) for p in params] == pytest.approx(
        expected, rel=1e-4
    )
    for p, before, c in zip(params[:4], (1.0, 1e-3, 100.0, 0.0), expected):
        torch.testing.assert_close(
            p.detach(), torch.full((50,), before - 0.1 * c * u), rtol=1e-4, atol=1e-6
        )


def test_lambs_own_state_starts_a_onebit_lamb():
    lamb = make(Single(), onebit.Lamb)
    for t in range(5):
        step(lamb, t, 0)
    other = make(Single(), onebit.OneBitLamb, warmup=20)
    other.optimizer.load_state_dict(saved(lamb.optimizer))
    assert numbers(other, "coefficient") == numbers(lamb, "coefficient") and numbers(
        other, "coefficient_average"
    ) == [0.0, 0.0]
