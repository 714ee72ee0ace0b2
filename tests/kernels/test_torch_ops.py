"""Packed signs and sums of `torch_ops`, beside NumPy's."""

import numpy as np
import pytest
import torch
from helpers.cases import more
from helpers.sums import LENGTHS, in_lanes, numbers_to_add

from onebit.kernels import torch_ops
from onebit.layout import ALIGNMENT, Layout, pack_bits, unpack_bits


@pytest.mark.report("R26")
@pytest.mark.parametrize("n", [0, 1000, 4096, *more(8, 64)])
def test_packed_signs_are_numpys_little_endian_bits(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[::5] = 0.0
    x[1::5] = -0.0
    bits = torch_ops.pack_signs(x)
    np.testing.assert_array_equal(bits.numpy(), np.packbits(x.numpy() >= 0, bitorder="little"))
    if n % ALIGNMENT == 0:
        scaled = torch_ops.scaled_signs(bits, torch.tensor([2.5]), torch.tensor([n]))
        assert torch.equal(scaled, torch.where(x >= 0, 2.5, -2.5))


def test_bits_are_packed_and_unpacked_in_little_endian_order():
    flags = torch.rand(1600, generator=torch.Generator().manual_seed(0)) < 0.3
    bits = pack_bits(flags)
    np.testing.assert_array_equal(bits.numpy(), np.packbits(flags.numpy(), bitorder="little"))
    assert torch.equal(unpack_bits(bits), flags)
    assert torch.equal(pack_bits(flags[::2]), pack_bits(flags[::2].clone()))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_neighbouring_numbers_are_added_in_lanes(lengths):
    """Bit for bit what adding one number after another to its lane, then halves, gives."""
    numbers = numbers_to_add(sum(lengths))
    found = torch_ops.sums_of_runs(numbers, torch.tensor(lengths))
    assert found.tolist() == [in_lanes(run.tolist()) for run in numbers.split(lengths)]


def test_sums_do_not_depend_on_the_number_of_threads():
    layout = Layout([(ALIGNMENT * 1234,), (0,), (ALIGNMENT * 3766 - 5,)], 3)
    partition = layout.worker_partition()
    x = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums.append(
                torch_ops.group_sums(partition, torch_ops.block_sums(partition, x, square=False))
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*sums) and sums[0][1] == 0
    parts = x.double().split(layout.lengths.tolist())
    torch.testing.assert_close(
        sums[0], torch.stack([part.sum() for part in parts]), rtol=1e-12, atol=1e-10
    )
    squares = torch_ops.group_sums(partition, torch_ops.block_sums(partition, x))
    torch.testing.assert_close(
        squares, torch.stack([part.square().sum() for part in parts]), rtol=1e-12, atol=0
    )
