import torch

from ..kernels import torch_ops
from .base import Compressor


class Sign(Compressor):
    """One bit per element and one scale per group: C[x] = ||x||_2 / sqrt(count) * sign(x), sign(0) = +1.

    The scale gives C[x] the l2 norm of x in each group ("1-bit Adam", section 4.3); `count` is the number of active elements.
    A row's message is its bits, 1/8 byte an element, then one scale for each of its pieces.
    """

    def __init__(self, partition, dtype):
        super().__init__(partition, dtype)
        self.counts = torch_ops.segment_sums(partition.active, partition.lengths).clamp(min=1)
        self.bit_bytes = int(partition.piece_lengths[0].sum()) // 8
        self.row_bytes = self.bit_bytes + partition.piece_lengths.shape[1] * dtype.itemsize

    def compress(self, x, generator=None):
        squares = torch_ops.segment_sums(x, self.partition.lengths, square=True)
        scales = (squares / self.counts).sqrt().to(self.dtype)
        bits = torch_ops.pack_signs(x).view(-1, self.bit_bytes)
        return torch.cat([bits, scales[self.partition.piece_groups].view(torch.uint8)], dim=1)

    def decompress(self, payload):
        bits = payload[..., : self.bit_bytes].flatten(-2)
        scales = payload[..., self.bit_bytes :].clone(memory_format=torch.contiguous_format).view(self.dtype).flatten(-2)
        x = torch_ops.scaled_signs(bits, scales, self.partition.piece_lengths.flatten())
        return torch.where(self.partition.active, x, 0)
