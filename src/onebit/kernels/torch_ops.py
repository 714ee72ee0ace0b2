"""The kernels' definition in plain torch, on any device. Bits are little-endian: element 8 i + j is bit j of byte i.

Sums add in one fixed order, so that they do not depend on the number of threads or the processor: a tree over ALIGNMENT
elements, then the partial sums of a segment one after another, all in float64.
"""

import torch

from ..layout import ALIGNMENT

_GATHER_BITS = 0x0102040810204080  # times 8 bytes of 0 or 1: their bits, first byte lowest, in the product's top byte
_SIGNS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.int8) * 2 - 1  # [256, 8]: a byte's 8 signs


def pack_signs(x):
    """float [n] -> uint8 [n / 8]: bit 1 where x >= 0, so that sign(0) = +1."""
    eight = (x >= 0).view(torch.int64)
    return ((eight * _GATHER_BITS) >> 56).to(torch.uint8)


def unpack_signs(bits, dtype):
    """uint8 [..., k] -> dtype [..., 8 k]: +1 or -1."""
    return _SIGNS.to(bits.device, dtype)[bits.long()].flatten(-2)


def segment_sums(x, lengths):
    """Sums of the consecutive segments of x [n]; `lengths` are multiples of ALIGNMENT. float64 [len(lengths)]."""
    partial = x.to(torch.float64).view(-1, ALIGNMENT)
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        partial = partial[:, :half] + partial[:, half:]
    return torch.segment_reduce(partial.flatten(), "sum", lengths=lengths // ALIGNMENT)


def total(x):
    """The sum of x [n], n a multiple of ALIGNMENT, as a Python float."""
    return float(segment_sums(x, torch.tensor([len(x)], device=x.device)))


def expand(values, lengths):
    """One value per segment -> one per element: [..., segments] -> [..., n]. `lengths` [segments]."""
    return values.repeat_interleave(lengths, dim=-1)


def mean_in_rank_order(rows):
    """[W, n] -> [n]: (row 0 + row 1 + ...) / W, in this order on every device."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)
