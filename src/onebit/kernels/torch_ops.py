"""The kernels' definition in plain torch, on any device. Bits are little-endian: element 8 i + j is bit j of byte i.

Sums add in one fixed order, so that they do not depend on the number of threads or the processor: a tree over ALIGNMENT
elements, then the partial sums of a segment one after another, all in float64.
"""

import torch

from ..layout import ALIGNMENT

_GATHER_BITS = 0x0102040810204080  # times 8 bytes of 0 or 1: their bits, first byte lowest, in the product's top byte
_SIGNS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.int8) * 2 - 1  # [256, 8]: a byte's 8 signs

_BLOCKS_IN_CACHE = 2048  # 1 MB of float64


def pack_signs(x):
    """float [n] -> uint8 [n / 8]: bit 1 where x >= 0, so that sign(0) = +1."""
    eight = (x >= 0).view(torch.int64)
    return ((eight * _GATHER_BITS) >> 56).to(torch.uint8)


def scaled_signs(bits, scales, lengths):
    """uint8 [..., n / 8], one scale per segment [..., segments] -> [..., n]: +scale or -scale."""
    signs = _SIGNS.to(bits.device, scales.dtype).index_select(0, bits.flatten().int())
    blocks = signs.view(*bits.shape[:-1], -1, ALIGNMENT)
    return blocks.mul_(per_block(scales, lengths)).flatten(-2)


def per_block(values, lengths):
    """One value per segment, [..., segments], for each block of ALIGNMENT elements: [..., n / ALIGNMENT, 1]."""
    return values.repeat_interleave(lengths // ALIGNMENT, dim=-1)[..., None]


def segment_sums(x, lengths, square=False):
    """Sums of the consecutive segments of x [n], or of its squares; `lengths` are multiples of ALIGNMENT. float64 [segments]."""
    blocks = x.view(-1, ALIGNMENT)
    parts = blocks.split(_BLOCKS_IN_CACHE) if x.device.type == "cpu" else [blocks]
    sums = torch.cat([_block_sums(part, square) for part in parts])
    return torch.segment_reduce(sums, "sum", lengths=lengths // ALIGNMENT)


def _block_sums(blocks, square):
    """[b, ALIGNMENT] -> float64 [b]: left half + right half, until one is left."""
    sums = blocks.to(torch.float64)
    if square:
        sums = sums * sums
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def total(x, square=False):
    """The sum of x [n] or of its squares, n a multiple of ALIGNMENT, as a Python float."""
    return float(segment_sums(x, torch.tensor([len(x)], device=x.device), square))


def mean_in_rank_order(rows):
    """[W, n] -> [n]: (row 0 + row 1 + ...) / W, in this order on every device."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)
