"""Parameters as one flat vector: where each tensor lies, which rank serves which part. The only place that pads.

    tensor 0      tensor 1        ...   tail          each tensor starts at a multiple of ALIGNMENT elements
    |######..|####################.|###|......|
    |<-- chunk of rank 0 -->|<-- chunk of rank 1 -->|   equal chunks; rank j averages ("serves") chunk j
    |-piece--|----piece-----|-piece|---|------|         a piece is the part of one tensor inside one chunk
"""

from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

ALIGNMENT = 64  # elements; 8 bytes of signs


def round_up(n, multiple):
    return -(-n // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Partition:
    """How a compressor cuts a flat vector of n elements.

    Attributes:
        lengths: int64 [groups], elements in each group; consecutive groups cover the vector, each has its own scale.
        active: bool [n], False where an element takes no part: padding, and coordinates without variance.
        piece_lengths: int64 [rows, pieces]; the vector is `rows` messages of equal length, row r consists of these pieces
            (shorter lists end in pieces of length 0).
        piece_groups: int64 [rows, pieces], the group that each piece belongs to.
    """

    lengths: torch.Tensor
    active: torch.Tensor
    piece_lengths: torch.Tensor
    piece_groups: torch.Tensor


class Layout:
    """The flat vector of tensors with the given `shapes`, shared among `ranks`.

    Args:
        shapes: of the tensors, in order. Elements are laid out row-major whatever the strides.
        ranks: W, the number of ranks, each of which serves one chunk.
        device: where the index tensors live.

    Attributes:
        chunk: elements that one rank serves, a multiple of ALIGNMENT.
        size: W * chunk, the length of the flat vector; tensors end at `used`, the rest is the tail.
        real: bool [size], False on padding.
    """

    def __init__(self, shapes, ranks, device="cpu"):
        self.shapes = [tuple(shape) for shape in shapes]
        self.ranks = ranks
        self.numels = [prod(shape) for shape in self.shapes]
        lengths = [round_up(numel, ALIGNMENT) for numel in self.numels]
        *self.starts, self.used = accumulate(lengths, initial=0)
        self.chunk = max(round_up(-(-self.used // ranks), ALIGNMENT), ALIGNMENT)
        self.size = ranks * self.chunk
        self.device = torch.device(device)
        self.lengths = torch.tensor(lengths + [self.size - self.used], device=device)  # the tail is a group without real elements
        self.real = torch.zeros(self.size, dtype=torch.bool, device=device)
        for start, numel in zip(self.starts, self.numels):
            self.real[start : start + numel] = True

    def views(self, flat):
        """The tensors inside `flat` [size], as views in their own shapes."""
        return [flat[s : s + n].view(shape) for s, n, shape in zip(self.starts, self.numels, self.shapes)]

    def span(self, first, last):
        """The slice of the flat vector that holds tensors first, ..., last - 1, padding included."""
        edges = [*self.starts, self.used]
        return slice(edges[first], edges[last])

    def chunk_of(self, rank):
        """The slice of the flat vector that `rank` serves."""
        return slice(rank * self.chunk, (rank + 1) * self.chunk)

    def worker_partition(self, active):
        """One scale per tensor; row j is what travels to rank j."""
        pieces = self._pieces()
        return Partition(self.lengths, active, self._table(pieces, 1), self._table(pieces, 0))

    def server_partition(self, rank, active):
        """One scale per piece of the chunk that `rank` serves; one row."""
        lengths = self._table(self._pieces(), 1)[rank : rank + 1]
        groups = torch.arange(lengths.shape[1], device=self.device)[None]
        return Partition(lengths[0], active[self.chunk_of(rank)], lengths, groups)

    def _pieces(self):
        """For each chunk its pieces: (tensor, elements)."""
        pieces = [[] for _ in range(self.ranks)]
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

