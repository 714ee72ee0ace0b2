from math import ceil
from numbers import Real

import torch
from torch import Generator, Tensor

from onebit.compression.base import Compressor
from onebit.layout import Partition, round_up


class TopK(Compressor):
    """The largest elements only: the k = ceil(density d) largest |x| of each piece of d elements.

    The other elements are 0; of equal ones the first is sent. The choice is made in each piece and
    not in a whole group, so that every row's message has the same size: every tensor sends its part
    from every chunk. q^2 is the largest 1 - k / d among a group's pieces.

    A row's message is its values, then their positions in the row as int32, both piece by piece.
    It has room for ceil(density * elements) + pieces of them; what is not needed is 0.

    Args:
        density: the share of the elements that is sent, above 0 and at most 1.

    Raises ValueError if the density is anything else.
    """

    def __init__(self, partition: Partition, dtype: torch.dtype, density: float = 0.01):
        super().__init__(partition, dtype)
        if not _is_share(density):
            raise ValueError(
                "TopK takes a density above 0 and at most 1, the share of elements that is sent, "
                f"not {density!r}"
            )
        rows, pieces = partition.piece_lengths.shape
        # of 8 or 12 bytes each, so that a row is a multiple of 16 bytes
        self._room = round_up(ceil(density * partition.row_elements) + pieces, 4)
        self.row_bytes = self._room * (dtype.itemsize + 4)
        self._lengths = partition.piece_lengths.flatten().tolist()
        counts = [int(piece.sum()) for piece in partition.active.split(self._lengths)]
        self._sent = [ceil(density * count) for count in counts]
        self._kept = torch.tensor(
            [k / count if count else 1.0 for k, count in zip(self._sent, counts)],
            dtype=torch.float64,
        )
        slots = [
            torch.arange(sum(self._sent[r * pieces : (r + 1) * pieces])) + r * self._room
            for r in range(rows)
        ]
        self._slots = torch.cat(slots).to(partition.mask.device)

    def compress(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        chosen, first = [], 0
        for piece, k in zip(x.split(self._lengths), self._sent):
            chosen.append(piece.abs().sort(descending=True, stable=True).indices[:k] + first)
            first += len(piece)
        places = torch.cat(chosen)
        values, positions = self._empty(x.dtype), self._empty(torch.int32)
        values.view(-1)[self._slots] = x[places]
        positions.view(-1)[self._slots] = (places % self.partition.row_elements).to(torch.int32)
        return torch.cat([values.view(torch.uint8), positions.view(torch.uint8)], dim=1)

    def decompress(self, payload: Tensor) -> Tensor:
        cut = self._room * self.dtype.itemsize
        values, positions = (
            part.clone(memory_format=torch.contiguous_format).view(dtype)
            for part, dtype in ((payload[..., :cut], self.dtype), (payload[..., cut:], torch.int32))
        )
        shape = *payload.shape[:-1], self.partition.row_elements
        rows = torch.zeros(shape, dtype=self.dtype, device=payload.device)
        # Added, not assigned, because unused room says value 0 at position 0.
        return rows.scatter_add_(-1, positions.long(), values).flatten(-2)

    def error_bound(self) -> Tensor:
        kept = torch.ones(len(self.partition.lengths), dtype=torch.float64)
        kept.scatter_reduce_(0, self.partition.piece_groups.flatten().cpu(), self._kept, "amin")
        return (1 - kept).sqrt().to(self.partition.mask.device)

    def _empty(self, dtype):
        """A zero for each element that there is room for, [rows, room]."""
        rows = len(self.partition.piece_lengths)
        return torch.zeros(rows, self._room, dtype=dtype, device=self.partition.mask.device)


def _is_share(density):
    return isinstance(density, Real) and not isinstance(density, bool) and 0 < density <= 1
