"""Quantize: levels, codes and bytes by hand, and rounding at random that is right on average."""

import pytest
import torch
from helpers.compressors import BITS, drawing, lone

from onebit.compression import Quantize
from onebit.layout import Layout


def test_levels_by_hand():
    """4 bits: s = 7. Under the max norm 14 the levels are even numbers.

    Under the l2 norm of (3, 4) they are multiples of 5/7.
    """
    assert lone([14.0, -13.1, 0.9, -1.1, 0.0], Quantize, bits=4)[2] == [14.0, -14.0, 0.0, -2.0, 0.0]
    assert lone([3.0, -4.0], Quantize, bits=4, norm="l2")[2] == pytest.approx(
        [4 * 5 / 7, -6 * 5 / 7]
    )
    assert lone([1.0, -0.4, 0.6], Quantize, bits=2)[2] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("bits", BITS)
def test_a_norm_that_comes_out_too_small_turns_no_sign(bits):
    """The square of 2.7e-162 is rounded down by a third, to the smallest number that there is."""
    assert 0.8 < lone([2.7e-162], Quantize, bits=bits, norm="l2")[2][0] / 2.7e-162 < 0.9


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_twos_complement_lowest_bits_first(bits):
    s = 2 ** (bits - 1) - 1
    made, flat, out = lone(
        [float(k) for k in (s, -s, 0, 1 if s > 1 else 0, -1, 0, s, s)], Quantize, bits=bits
    )
    codes = [s, -s, 0, 1 if s > 1 else 0, -1, 0, s, s]
    assert out == codes
    number = sum((code % 2**bits) << (bits * i) for i, code in enumerate(codes))
    assert made.compress(flat)[0][:bits].tolist() == list(number.to_bytes(bits, "little"))


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_is_right_on_average_and_to_a_neighbour(norm, bits):
    """The mean of N draws is within 5 standard errors of x, a draw's variance being at most
    (unit / 2)^2; no element moves by a whole unit.
    """
    layout = Layout([(200,)], 1)
    made = Quantize(layout.worker_partition(), torch.float64, bits=bits, norm=norm, stochastic=True)
    x = torch.randn(layout.size, generator=drawing(7), dtype=torch.float64).where(layout.real, 0)
    unit = float(x.abs().max() if norm == "max" else x.norm()) / made.levels
    draws = torch.stack([made.decompress(made.compress(x, drawing(seed))) for seed in range(2000)])
    assert ((draws - x).abs() < unit * (1 + 1e-9)).all()
    assert (draws.mean(0) - x).abs().max() <= 5 * unit / 2 / 2000**0.5
    assert (draws.mean(0) - x)[:200].std() > 0
