"""DistributedAdam equals its reference; all ranks hold the same bits."""

import pytest
from helpers.reference_runs import (
    WORLD_SIZES,
    assert_equals_reference,
    gradients_of_all,
    joined,
    reference_options,
    start_values,
    train,
)

import onebit
from onebit import reference


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_adam_equals_its_reference(ranks, bias_correction, max_norm):
    options = {"bias_correction": bias_correction, "max_grad_norm": max_norm}
    history = onebit.comm.run_threads(ranks, lambda c: train(c, onebit.DistributedAdam, options))
    assert_equals_reference(
        history,
        reference.adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
    )
