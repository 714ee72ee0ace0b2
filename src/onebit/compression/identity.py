import torch
from torch import Generator, Tensor

from onebit.compression.base import Compressor
from onebit.layout import Partition


class Identity(Compressor):
    """C[x] = x, sent as it is: 4 bytes per element in float32, q = 0.

    With it 1-bit Adam becomes the paper's "1-bit Adam (32 bits)".
    """

    def __init__(self, partition: Partition, dtype: torch.dtype):
        super().__init__(partition, dtype)
        self.row_bytes = int(partition.piece_lengths[0].sum()) * dtype.itemsize

    def compress(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        return x.contiguous().view(torch.uint8).view(-1, self.row_bytes)

    def decompress(self, payload: Tensor) -> Tensor:
        return payload.contiguous().view(self.dtype).flatten(-2)

    def error_bound(self) -> Tensor:
        return torch.zeros_like(self.partition.counts)
