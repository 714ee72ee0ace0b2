import torch
from torch import Generator, Tensor

from onebit import kernels
from onebit.compression.base import Compressor, check_error
from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Terms
from onebit.layout import Partition


class Sign(Compressor):
    """One bit per element and one scale per group.

        C[x] = ||x||_2 / sqrt(count) * sign(x),    sign(0) = +1

    The scale gives C[x] the l2 norm of x in each group ("1-bit Adam", section 4.3); `count` is the
    number of active elements. A row's message is its bits, 1/8 byte per element, then one scale for
    each of its pieces, then zeros up to a multiple of 16 bytes.

    q^2 = 2 - 2 / sqrt(count), which a vector with a single nonzero element attains. In general
    ||C[x] - x||^2 / ||x||^2 = 2 - 2 ||x||_1 / (sqrt(count) ||x||_2), which is 0.4 for normally
    distributed elements.
    """

    def __init__(self, partition: Partition, dtype: torch.dtype):
        super().__init__(partition, dtype)
        self.kernels = kernels.for_device(partition.mask.device.type)
        self.row_bytes = partition.row_bytes(1, dtype.itemsize)

    def compress(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        sums = torch_ops.block_sums(self.partition, x)
        scales = torch_ops.root_mean_squares(self.partition, sums).to(self.dtype)
        return torch_ops.join_payload(self.partition, torch_ops.pack_signs(x), scales)

    def decompress(self, payload: Tensor) -> Tensor:
        return torch_ops.decode(self.partition, payload, self.dtype)

    def scales(self, payload: Tensor) -> Tensor:
        return torch_ops.split_payload(self.partition, payload, self.dtype)[1]

    def error_bound(self) -> Tensor:
        return torch_ops.square_root(2 - 2 / torch_ops.square_root(self.partition.counts))

    def with_feedback(self, in_place: bool = True) -> "SignFeedback":
        return SignFeedback(self, in_place)


class SignFeedback:
    """`Feedback` of `Sign` in one pass over the memory, by the kernels of the vector's device.

    It keeps the error as the compensated vector c = z + e and the scales that were sent:
    e = c - scale * sign(c). The signs do not depend on the scale, so that one pass suffices, where
    two would be needed to store e itself; the bits are the same.
    """

    def __init__(self, compressor: Sign, in_place: bool):
        self.compressor = compressor
        self._in_place = in_place
        # T [n] each. None: all zeros, and not yet allocated.
        self._compensated: Tensor | None = None
        self._spare: Tensor | None = None
        partition = compressor.partition
        self._scales = self._next_scales = torch.zeros(
            len(partition.lengths), dtype=compressor.dtype, device=partition.mask.device
        )

    @property
    def error(self) -> Tensor:
        partition = self.compressor.partition
        if self._compensated is None:
            return partition.zeros(self.compressor.dtype)
        signs = torch_ops.pack_signs(self._compensated)
        sent = torch_ops.scaled_signs(signs, self._scales, partition.lengths)
        error = torch.sub(self._compensated, sent, out=sent)
        return error.masked_fill_(partition.inactive, 0)

    @error.setter
    def error(self, value: Tensor) -> None:
        check_error(value, self.compressor)
        self._compensated, self._spare = value.clone(), None
        self._scales = torch.zeros_like(self._scales)

    def compress(self, terms: Terms, generator: Generator | None = None) -> Tensor:
        return self._round(self.compressor.kernels.compress, terms)

    def average(self, received: Tensor, generator: Generator | None = None) -> Tensor:
        return self._round(self.compressor.kernels.average, received)

    def commit(self) -> None:
        self._compensated, self._spare = self._spare, self._compensated
        self._scales = self._next_scales

    def _round(self, kernel, z):
        partition = self.compressor.partition
        if self._compensated is None:
            self._compensated = partition.zeros(self.compressor.dtype)
        if self._spare is None:
            self._spare = (
                self._compensated if self._in_place else torch.empty_like(self._compensated)
            )
        payload, self._next_scales = kernel(
            partition, z, self._compensated, self._scales, self._spare
        )
        if self._in_place:
            # c is overwritten already, so the scales must follow. If the exchange fails, what was
            # sent is lost, but c and its scales still belong to one round.
            self._scales = self._next_scales
        return payload
