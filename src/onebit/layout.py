"""How parameters lie in one flat vector, and which rank serves which part of it.

This is the only place that pads.

tensor 0   tensor 1             ... tail    each tensor starts at a multiple of ALIGNMENT elements
|######..|####################.|###|......|
|<- chunk of rank 0->|<- chunk of rank 1->| equal chunks; rank j averages ("serves") chunk j
|-piece--|---piece---|--piece--|---|------| a piece is the part of one tensor in one chunk
|...|....|....|....|.|....|....|...|....|.| kernels work on blocks: at most BLOCK elements

A group is what shares one scale: for a worker a tensor, for a server a piece.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # elements; 8 bytes of bits
BLOCK = 64 * ALIGNMENT  # elements; 16 KB of float32, which a core's first cache holds twice
ROW_ALIGNMENT = 16  # bytes; NCCL copies a message that begins elsewhere byte by byte

# Times 8 bytes of 0 or 1, the product's top byte has these bytes as its bits, the first one lowest.
_GATHER_BITS = 0x0102040810204080


class Column(IntEnum):
    """Columns of a partition's table of blocks."""

    START = 0  # the block's first element in the vector
    LENGTH = 1  # its elements, a multiple of ALIGNMENT
    REAL = 2  # those that are not padding; they come first
    GROUP = 3  # its group, in a worker's partition the tensor
    OFFSET = 4  # the position of its first element in the group
    PIECE = 5  # its piece, counted row by row in the table of pieces
    FULL = 6  # 1 if every element is active


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def pack_bits(flags: Tensor) -> Tensor:
    """bool [n] -> uint8 [n / 8], little-endian: element 8 i + j is bit j of byte i.

    Besides the flags it takes 1 byte an element of memory for a moment.
    """
    eight = flags.contiguous().view(torch.int64) * _GATHER_BITS
    return eight.bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """uint8 [n / 8] -> bool [n]. It takes 1 byte an element more for a moment."""
    masks = torch.tensor([1 << j for j in range(8)], dtype=torch.uint8, device=bits.device)
    return (bits[:, None] & masks).flatten().bool()


@dataclass(frozen=True, eq=False)
class Partition:
    """How a compressor cuts a flat vector of n elements. All tensors are on the vector's device.

    Attributes:
        lengths: int64 [groups], elements in each group. Consecutive groups cover the vector, and
            each has its own scale.
        counts: float64 [groups], active elements in each group, or 1 if there is none.
        piece_lengths: int64 [rows, pieces]. The vector is `rows` messages of equal length, and row
            r consists of these pieces (shorter lists end in pieces of length 0).
        piece_groups: int64 [rows, pieces], the group that each piece belongs to.
        mask: uint8 [n / 8], a bit for each element. It is 0 where the element takes no part:
            padding, and coordinates without variance.
        blocks: int64 [blocks, len(Column)], in the vector's order.
    """

    lengths: Tensor
    counts: Tensor
    piece_lengths: Tensor
    piece_groups: Tensor
    mask: Tensor
    blocks: Tensor

    @property
    def active(self) -> Tensor:
        """bool [n], the mask unpacked."""
        return unpack_bits(self.mask)

    @property
    def inactive(self) -> Tensor:
        """bool [n], the opposite."""
        return unpack_bits(~self.mask)

    @property
    def size(self) -> int:
        """n, the number of elements of the vector."""
        return 8 * len(self.mask)

    @property
    def row_elements(self) -> int:
        """The number of elements that one row carries."""
        return self.size // len(self.piece_lengths)

    def row_bytes(self, bits: int, itemsize: int) -> int:
        """Bytes of one row's message: codes of `bits` bits, a scale for each piece, and padding."""
        scales = self.piece_lengths.shape[1] * itemsize
        return round_up(self.row_elements * bits // 8 + scales, ROW_ALIGNMENT)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A vector of zeros, [n]."""
        return torch.zeros(self.size, dtype=dtype, device=self.mask.device)


class Layout:
    """The flat vector of tensors with the given `shapes`, shared among `ranks`.

    Args:
        shapes: of the tensors, in order. Elements lie in row-major order whatever the strides are.
        ranks: W, the number of ranks, each of which serves one chunk.
        device: where the index tensors live.

    Attributes:
        chunk: the number of elements that one rank serves, a multiple of ALIGNMENT.
        size: W * chunk, the length of the flat vector. The tensors end at `used`; the rest is the
            tail, which is padding.
        lengths: int64 [tensors + 1], elements of each tensor with its padding, and of the tail.
    """

    def __init__(
        self, shapes: Iterable[Sequence[int]], ranks: int, device: torch.device | str = "cpu"
    ):
        self.shapes = [tuple(shape) for shape in shapes]
        self.ranks = ranks
        self.numels = [prod(shape) for shape in self.shapes]
        lengths = [round_up(numel, ALIGNMENT) for numel in self.numels]
        *self.starts, self.used = accumulate(lengths, initial=0)
        self.chunk = max(round_up(-(-self.used // ranks), ALIGNMENT), ALIGNMENT)
        self.size = ranks * self.chunk
        self.device = torch.device(device)
        self.lengths = torch.tensor(lengths + [self.size - self.used], device=device)

    @property
    def real(self) -> Tensor:
        """bool [size], False on padding."""
        real = torch.zeros(self.size, dtype=torch.bool, device=self.device)
        for view in self.views(real):
            view.fill_(True)
        return real

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside `flat` [size], as views in their own shapes."""
        return [
            flat[s : s + n].view(shape)
            for s, n, shape in zip(self.starts, self.numels, self.shapes)
        ]

    def span(self, first: int, last: int) -> slice:
        """The slice of the flat vector with tensors first, ..., last - 1, padding included."""
        edges = [*self.starts, self.used]
        return slice(edges[first], edges[last])

    def chunk_of(self, rank: int) -> slice:
        """The slice of the flat vector that `rank` serves."""
        return slice(rank * self.chunk, (rank + 1) * self.chunk)

    def worker_partition(self, active: Tensor | None = None) -> Partition:
        """One scale per tensor; row j is what travels to rank j.

        active: bool [size], by default all elements but padding.
        """
        pieces = self._pieces()
        mask = pack_bits(self.real if active is None else active)
        return _partition(
            self.lengths, self._table(pieces, 1), self._table(pieces, 0), mask, self._blocks(pieces)
        )

    def server_partition(self, rank: int, worker: Partition) -> Partition:
        """One row, the chunk that `rank` serves, with one scale for each of its pieces.

        worker: the worker's partition of the same layout.
        """
        lengths = worker.piece_lengths[rank : rank + 1]
        groups = torch.arange(lengths.shape[1], device=self.device)[None]
        chunk = self.chunk_of(rank)
        start = worker.blocks[:, Column.START]
        blocks = worker.blocks[(start >= chunk.start) & (start < chunk.stop)]
        blocks[:, Column.START] -= chunk.start
        blocks[:, Column.PIECE] -= rank * lengths.shape[1]
        blocks[:, Column.GROUP] = blocks[:, Column.PIECE]
        starts = lengths[0].cumsum(0) - lengths[0]
        blocks[:, Column.OFFSET] = blocks[:, Column.START] - starts[blocks[:, Column.GROUP]]
        mask = worker.mask[chunk.start // 8 : chunk.stop // 8]
        return _partition(lengths[0], lengths, groups, mask, blocks)

    def _pieces(self):
        """For each chunk its pieces: (tensor, elements)."""
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        position = 0
        for tensor, length in enumerate(self.lengths.tolist()):
            end = position + length
            while position < end:
                rank = position // self.chunk
                cut = min(end, (rank + 1) * self.chunk)
                pieces[rank].append((tensor, cut - position))
                position = cut
        return pieces

    def _table(self, pieces, column):
        width = max(len(row) for row in pieces)
        rows = [[piece[column] for piece in row] + [0] * (width - len(row)) for row in pieces]
        return torch.tensor(rows, device=self.device)

    def _blocks(self, pieces):
        """The table of blocks; FULL, which depends on the mask, is not filled in yet."""
        width = max(len(row) for row in pieces)
        starts, numels = [*self.starts, self.used], [*self.numels, 0]
        rows, position = [], 0
        for rank, row in enumerate(pieces):
            for i, (tensor, length) in enumerate(row):
                for start in range(position, position + length, BLOCK):
                    block = min(BLOCK, position + length - start)
                    offset = start - starts[tensor]
                    real = min(max(numels[tensor] - offset, 0), block)
                    rows.append((start, block, real, tensor, offset, rank * width + i, 0))
                position += length
        return torch.tensor(rows, device=self.device)


def _partition(lengths, piece_lengths, piece_groups, mask, blocks):
    """A Partition with the counts and the FULL column, which follow from its mask."""
    active = torch.zeros(len(blocks), dtype=torch.int64, device=mask.device)
    per_byte = torch.tensor([i.bit_count() for i in range(256)], device=mask.device)[mask.int()]
    which = torch.arange(len(blocks), device=mask.device).repeat_interleave(
        blocks[:, Column.LENGTH] // 8
    )
    active.index_add_(0, which, per_byte)
    blocks[:, Column.FULL] = active == blocks[:, Column.LENGTH]
    counts = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device).index_add_(
        0, blocks[:, Column.GROUP], active.double()
    )
    return Partition(lengths, counts.clamp(min=1), piece_lengths, piece_groups, mask, blocks)
