from math import ceil
from numbers import Real

import torch

from onebit.compression.base import Compressor


class TopK(Compressor):
    """The largest elements only: of a piece with d active elements the k = ceil(density d) of largest |x|, the others are 0.

    Of equal ones the first is sent. Pieces rather than whole groups, since a row's message must have one size: every tensor sends its part
    from every chunk. q^2 is the largest 1 - k / d among a group's pieces.

    A row's message is its values, then their places in the row as int32, both piece by piece; there is room for
    ceil(density * elements) + pieces of them, the rest being 0.

    Args:
        density: the share of elements that is sent, above 0 and at most 1.
    """

    def __init__(self, partition, dtype, density=0.01):
        super().__init__(partition, dtype)
        if isinstance(density, bool) or not isinstance(density, Real) or not 0 < density <= 1:
            raise ValueError(
                f"TopK takes a density above 0 and at most 1, the share of elements that is sent, not {density!r}"
            )
        rows, pieces = partition.piece_lengths.shape
        self._room = ceil(density * partition.row_elements) + pieces
        self.row_bytes = self._room * (dtype.itemsize + 4)
        self._lengths = partition.piece_lengths.flatten().tolist()
        counts = [int(piece.sum()) for piece in partition.active.split(self._lengths)]
        self._sent = [ceil(density * count) for count in counts]
        self._kept = torch.tensor(
            [k / count if count else 1.0 for k, count in zip(self._sent, counts)],
            dtype=torch.float64,
        )
        self._slots = torch.cat(
            [
                torch.arange(sum(self._sent[r * pieces : (r + 1) * pieces])) + r * self._room
                for r in range(rows)
            ]
        )
        self._slots = self._slots.to(partition.mask.device)

    def compress(self, x, generator=None):
        chosen, first = [], 0
        for piece, k in zip(x.split(self._lengths), self._sent):
            chosen.append(piece.abs().sort(descending=True, stable=True).indices[:k] + first)
            first += len(piece)
        chosen = torch.cat(chosen)
        values, places = self._empty(x.dtype), self._empty(torch.int32)
        values.view(-1)[self._slots] = x[chosen]
        places.view(-1)[self._slots] = (chosen % self.partition.row_elements).to(torch.int32)
        return torch.cat([values.view(torch.uint8), places.view(torch.uint8)], dim=1)

    def decompress(self, payload):
        cut = self._room * self.dtype.itemsize
        values, places = (
            part.clone(memory_format=torch.contiguous_format).view(dtype)
            for part, dtype in ((payload[..., :cut], self.dtype), (payload[..., cut:], torch.int32))
        )
        rows = torch.zeros(
            *payload.shape[:-1],
            self.partition.row_elements,
            dtype=self.dtype,
            device=payload.device,
        )
        return rows.scatter_add_(-1, places.long(), values).flatten(
            -2
        )  # added, since room that is left says 0 at place 0

    def error_bound(self):
        kept = torch.ones(len(self.partition.lengths), dtype=torch.float64)
        kept.scatter_reduce_(0, self.partition.piece_groups.flatten().cpu(), self._kept, "amin")
        return (1 - kept).sqrt().to(self.partition.mask.device)

    def _empty(self, dtype):
        """A number for each element that there is room for, [rows, room]."""
        return torch.zeros(
            len(self.partition.piece_lengths),
            self._room,
            dtype=dtype,
            device=self.partition.mask.device,
        )
