"""1-bit Adam with each compressor equals its reference.

A wrong compressor is refused when the optimizer is made.
"""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.cases import holds_for_each, more
from helpers.compressors import every_compressor
from helpers.reference_runs import (
    T_W,
    assert_equals_reference,
    gradients_of_all,
    joined,
    reference_of,
    reference_options,
    segments,
    start_values,
    train,
)

import onebit
from onebit import reference
from onebit.compression import Identity, Quantize, TopK


@pytest.mark.parametrize("ranks", [3, *more(1, 2, 4)])
@every_compressor
def test_onebit_adam_with_every_compressor_equals_its_reference(ranks, compressor):
    """The random draws of the first compressed step are those of round T_w."""
    history = onebit.comm.run_threads(
        ranks, lambda c: train(c, onebit.OneBitAdam, {"warmup": T_W, "compressor": compressor})
    )
    assert_equals_reference(
        history,
        reference.one_bit_adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            T_w=T_W,
            C=reference_of(compressor, ranks, T_W),
            **reference_options(),
        ),
        corrected_at=T_W,
    )


@pytest.mark.parametrize("ranks", [3, *more(1)])
def test_all_of_the_elements_is_the_identity(ranks):
    """TopK of density 1 sends everything: 1-bit Adam with it is "1-bit Adam (32 bits)", bit for
    bit.
    """
    kept, plain = (
        onebit.comm.run_threads(
            ranks,
            lambda c, options={"warmup": T_W, "compressor": compressor}: train(
                c, onebit.OneBitAdam, options, 40
            ),
        )
        for compressor in (partial(TopK, density=1.0), Identity)
    )
    for a, b in zip(kept[0], plain[0], strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in "xmv")


@holds_for_each(
    [
        (partial(Quantize, bits=5), "bits among"),
        (partial(Quantize, norm="l1"), "norm among"),
        (partial(Quantize, stochastic=1), "True or False"),
        (partial(Quantize, seed=-1), "seed must be"),
        (partial(TopK, density=0), "density above 0"),
        (partial(TopK, density=1.5), "at most 1"),
    ]
)
def test_a_wrong_option_of_a_compressor_is_refused_when_the_optimizer_is_made(compressor, message):
    """Not at the freeze, when the warm-up would be lost."""
    with pytest.raises(ValueError, match=message):
        onebit.OneBitAdam(
            [torch.nn.Parameter(torch.ones(3))],
            warmup=3,
            compressor=compressor,
            communicator=onebit.comm.Single(),
        )


def test_what_makes_no_compressor_is_refused():
    with pytest.raises(TypeError, match="-> Compressor"):
        onebit.OneBitAdam(
            [torch.nn.Parameter(torch.ones(3))],
            warmup=3,
            compressor=lambda partition, dtype: None,
            communicator=onebit.comm.Single(),
        )


def test_references_by_hand():
    """quantize rounds half to even, or up where u is below the rest.

    top_k takes the first of equals, and neither sends a masked element.
    """
    everywhere, whole = np.ones(4, bool), [slice(0, 4)]
    x = np.array([14.0, -13.1, 0.9, -1.1])
    np.testing.assert_allclose(reference.quantize(x, whole, everywhere, 7), [14, -14, 0, -2])
    np.testing.assert_allclose(
        reference.quantize(x, whole, everywhere, 7, u=np.full(4, 0.5)), [14, -14, 0, -2]
    )
    np.testing.assert_allclose(
        reference.quantize(x, whole, everywhere, 7, u=np.zeros(4)), [14, -12, 2, 0]
    )
    np.testing.assert_allclose(
        reference.top_k(np.array([1.0, -3, 3, 2]), whole, everywhere, 0.25), [0, -3, 0, 0]
    )
    np.testing.assert_allclose(
        reference.top_k(np.array([1.0, -3, 3, 2]), whole, np.array([True, False, True, True]), 0.5),
        [0, 0, 3, 2],
    )
