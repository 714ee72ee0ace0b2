from abc import ABC, abstractmethod


class Compressor(ABC):
    """A map C with bounded error ||C[x] - x||, and the bytes in which C[x] travels.

    Args:
        partition: how the vector of n elements is cut into groups and rows, see `onebit.layout.Partition`.
        dtype: float32 or float64, of the vectors; float64 vectors send float64 numbers.

    `x` is 0 wherever `partition.active` is False, and C[x] must be 0 there too.

    Attributes:
        row_bytes: bytes of one row's message, fixed by the partition.
    """

    row_bytes: int

    def __init__(self, partition, dtype):
        self.partition = partition
        self.dtype = dtype

    @abstractmethod
    def compress(self, x, generator=None):
        """float [n] -> uint8 [rows, row_bytes]. `generator` (torch.Generator) feeds a compressor that draws lots."""

    @abstractmethod
    def decompress(self, payload):
        """uint8 [..., rows, row_bytes] -> C[x], float [..., n]."""
