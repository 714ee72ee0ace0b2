"""What a compressor is, and how it keeps the error that it makes."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Generator, Tensor

from onebit.kernels.torch_ops import Terms, combine
from onebit.layout import Partition


class Compressor(ABC):
    """A map C with bounded error ||C[x] - x||, and the bytes in which C[x] travels.

    A vector x is 0 wherever `partition.active` is False, and C[x] must be 0 there too.

    Args:
        partition: how the vector of n elements is cut into groups and rows.
        dtype: float32 or float64, of the vectors; scales and norms travel in the same type.

    Attributes:
        row_bytes: bytes of one row's message. It depends only on the row's length and its number
            of pieces, because a server knows its own row alone and must expect what the workers
            send.
        seed: of a stochastic compressor, whose random draws `onebit.allreduce` derives from it;
            None if C is deterministic.
    """

    row_bytes: int
    seed: int | None = None

    def __init__(self, partition: Partition, dtype: torch.dtype):
        self.partition = partition
        self.dtype = dtype

    @abstractmethod
    def compress(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """float [n] -> uint8 [rows, row_bytes]. A stochastic compressor draws from `generator`."""

    @abstractmethod
    def decompress(self, payload: Tensor) -> Tensor:
        """uint8 [..., rows, row_bytes] -> C[x], float [..., n]."""

    def scales(self, payload: Tensor) -> Tensor | None:
        """The few numbers in a payload uint8 [rows, row_bytes] that scale all others, which are
        finite and at least 0 unless something is wrong; None: there are none."""
        return None

    @abstractmethod
    def error_bound(self) -> Tensor:
        """q of each group, float64 [groups]: ||C[x] - x||_2 <= q ||x||_2 for every x.

        For a stochastic compressor the bound holds for the root of the mean square. With q < 1,
        error feedback keeps its error bounded, which the convergence theorem requires.
        """

    def with_feedback(self, in_place: bool = True) -> "Feedback":
        """This compressor with error feedback.

        in_place: save memory by overwriting the old error, so that a round cannot be dropped.
        """
        return ErrorFeedback(self)


class Feedback(Protocol):
    """Compression that keeps what it loses: it sends C[z + e], and e <- z + e - C[z + e].

    The new error counts from `commit`. A round without it is dropped: the next one starts from
    the old error.
    """

    @property
    def error(self) -> Tensor:
        """e, float [n]. It may be assigned."""

    @error.setter
    def error(self, value: Tensor) -> None: ...

    def compress(self, terms: Terms, generator: Generator | None = None) -> Tensor:
        """A worker's part: the payload of z, uint8 [rows, row_bytes]."""

    def average(self, received: Tensor, generator: Generator | None = None) -> Tensor:
        """A server's part: the payload of the mean of what the ranks sent, uint8 [1, row_bytes].

        received: uint8 [W, row_bytes]; the rows are added in rank order.
        """

    def commit(self) -> None:
        """The error of the last round becomes the one that the next round adds."""


class ErrorFeedback:
    """`Feedback` of any compressor, in plain torch."""

    def __init__(self, compressor: Compressor):
        self.compressor = compressor
        self._error = self._next = compressor.partition.zeros(compressor.dtype)

    @property
    def error(self) -> Tensor:
        return self._error

    @error.setter
    def error(self, value: Tensor) -> None:
        check_error(value, self.compressor)
        self._error = value.clone()

    def compress(self, terms: Terms, generator: Generator | None = None) -> Tensor:
        C = self.compressor
        return self._compress(combine(C.partition, terms, C.dtype, C.decompress), generator)

    def average(self, received: Tensor, generator: Generator | None = None) -> Tensor:
        rows = self.compressor.decompress(received[:, None])
        return self._compress(sum(rows[1:], rows[0]) / len(rows), generator)

    def commit(self) -> None:
        self._error = self._next

    def _compress(self, z, generator):
        compensated = torch.where(self.compressor.partition.active, z + self._error, 0)
        payload = self.compressor.compress(compensated, generator)
        self._next = compensated - self.compressor.decompress(payload)
        return payload


def check_error(value: Tensor, compressor: Compressor) -> None:
    """Raise ValueError unless `value` can be the error of this compressor."""
    size, dtype = compressor.partition.size, compressor.dtype
    if value.shape != (size,) or value.dtype != dtype:
        raise ValueError(
            f"this compression error has {size} elements of {dtype}, not {tuple(value.shape)} of "
            f"{value.dtype}"
        )
