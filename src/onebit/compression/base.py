from abc import ABC, abstractmethod

import torch

from onebit.kernels.torch_ops import Terms, apply_moves, combine


class Compressor(ABC):
    """A map C with bounded error ||C[x] - x||, and the bytes in which C[x] travels.

    Args:
        partition: how the vector of n elements is cut into groups and rows, see `onebit.layout.Partition`.
        dtype: float32 or float64, of the vectors; float64 vectors send float64 numbers.

    `x` is 0 wherever `partition.active` is False, and C[x] must be 0 there too.

    Attributes:
        row_bytes: bytes of one row's message. Fixed by the row's length and its number of pieces, so that a server, which knows its own
            row alone, and a worker promise the same.
        seed: of a compressor that draws lots, which are then a function of it, see `onebit.allreduce`; else None.
    """

    row_bytes: int
    seed = None

    def __init__(self, partition, dtype):
        self.partition = partition
        self.dtype = dtype

    @abstractmethod
    def compress(self, x, generator=None):
        """float [n] -> uint8 [rows, row_bytes]. `generator` (torch.Generator) feeds a compressor that draws lots."""

    @abstractmethod
    def decompress(self, payload):
        """uint8 [..., rows, row_bytes] -> C[x], float [..., n]."""

    @abstractmethod
    def error_bound(self):
        """q of each group, float64 [groups]: ||C[x] - x||_2 <= q ||x||_2 for every x; of one that draws lots the same of the mean square.

        With q < 1 error feedback keeps its error bounded, which is what the theorem asks for.
        """

    def adam_update(self, parameters, variance, payload, decays, steps, epss):
        """x <- decay x - (step m) / (sqrt(v) + eps) in place, m being what `payload` says; see `onebit.kernels.torch_ops.update`."""
        nothing = [None] * len(parameters)
        moves = combine(
            self.partition, Terms(nothing, nothing, payload, steps), self.dtype, self.decompress
        )
        apply_moves(self.partition, parameters, variance, moves, decays, epss)

    def with_feedback(self, in_place=True):
        """An `ErrorFeedback` of this compressor; `in_place`: memory matters more than that a round can be dropped."""
        return ErrorFeedback(self)


class ErrorFeedback:
    """Compression that keeps what it loses: it sends C[z + e], and e <- z + e - C[z + e].

    The new e counts from `commit`; without it, the next round starts from the old one.

    Attributes:
        error: e, float [n]; may be assigned.
    """

    def __init__(self, compressor):
        self.compressor = compressor
        self._error = self._next = compressor.partition.zeros(compressor.dtype)

    @property
    def error(self):
        return self._error

    @error.setter
    def error(self, value):
        self._error = value.clone()

    def compress(self, terms, generator=None):
        """The payload of z given as `onebit.kernels.torch_ops.Terms`: uint8 [rows, row_bytes]."""
        return self._compress(
            combine(
                self.compressor.partition, terms, self.compressor.dtype, self.compressor.decompress
            ),
            generator,
        )

    def average(self, received, generator=None):
        """The payload of the mean of what came from the ranks, uint8 [W, row_bytes], added in rank order: uint8 [1, row_bytes]."""
        rows = self.compressor.decompress(received[:, None])
        return self._compress(sum(rows[1:], rows[0]) / len(rows), generator)

    def commit(self):
        self._error = self._next

    def _compress(self, z, generator):
        compensated = torch.where(self.compressor.partition.active, z + self._error, 0)
        payload = self.compressor.compress(compensated, generator)
        self._next = compensated - self.compressor.decompress(payload)
        return payload
