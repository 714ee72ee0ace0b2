import torch

from onebit import kernels
from onebit.compression.base import Compressor
from onebit.kernels import torch_ops


class Sign(Compressor):
    """One bit per element and one scale per group: C[x] = ||x||_2 / sqrt(count) * sign(x), sign(0) = +1.

    The scale gives C[x] the l2 norm of x in each group ("1-bit Adam", section 4.3); `count` is the number of active elements.
    A row's message is its bits, 1/8 byte an element, then one scale for each of its pieces.

    q^2 = 2 - 2 / sqrt(count), which a vector with a single element that is not zero attains. In general ||C[x] - x||^2 / ||x||^2 is
    2 - 2 ||x||_1 / (sqrt(count) ||x||_2), or 0.4 if the elements are normally distributed.
    """

    def __init__(self, partition, dtype):
        super().__init__(partition, dtype)
        self.kernels = kernels.for_device(partition.mask.device.type)
        self.row_bytes = (
            partition.row_elements // 8 + partition.piece_lengths.shape[1] * dtype.itemsize
        )

    def compress(self, x, generator=None):
        scales = torch_ops.root_mean_squares(
            self.partition, torch_ops.block_sums(self.partition, x)
        ).to(self.dtype)
        return torch_ops.join_payload(self.partition, torch_ops.pack_signs(x), scales)

    def decompress(self, payload):
        return torch_ops.decode(self.partition, payload, self.dtype)

    def error_bound(self):
        return torch_ops.square_root(2 - 2 / torch_ops.square_root(self.partition.counts))

    def adam_update(self, parameters, variance, payload, decays, steps, epss):
        self.kernels.update(self.partition, parameters, variance, payload, decays, steps, epss)

    def with_feedback(self, in_place=True):
        return SignFeedback(self, in_place)


class SignFeedback:
    """`ErrorFeedback` of `Sign` in one pass over the memory, by the kernels of the vector's device.

    The error is kept as the compensated vector c = z + e and the scales that were sent: e = c - scale * sign(c). Signs do not depend
    on the scale, so one pass does what takes two if e itself is kept, and the bits are the same.
    """

    def __init__(self, compressor, in_place):
        self.compressor = compressor
        self._in_place = in_place
        self._compensated = self._spare = (
            None  # T [n] each; None: all zero, respectively not there yet
        )
        self._scales = self._next_scales = torch.zeros(
            len(compressor.partition.lengths),
            dtype=compressor.dtype,
            device=compressor.partition.mask.device,
        )

    @property
    def error(self):
        if self._compensated is None:
            return self.compressor.partition.zeros(self.compressor.dtype)
        lengths = self.compressor.partition.lengths
        sent = torch_ops.scaled_signs(
            torch_ops.pack_signs(self._compensated), self._scales, lengths
        )
        return torch.where(self.compressor.partition.active, self._compensated - sent, 0)

    @error.setter
    def error(self, value):
        self._compensated, self._spare = value.clone(), None
        self._scales = torch.zeros_like(self._scales)

    def compress(self, terms, generator=None):
        return self._round(self.compressor.kernels.compress, terms)

    def average(self, received, generator=None):
        return self._round(self.compressor.kernels.average, received)

    def commit(self):
        self._compensated, self._spare = self._spare, self._compensated
        self._scales = self._next_scales

    def _round(self, kernel, z):
        if self._compensated is None:
            self._compensated = self.compressor.partition.zeros(self.compressor.dtype)
        if self._spare is None:
            self._spare = (
                self._compensated if self._in_place else torch.empty_like(self._compensated)
            )
        payload, self._next_scales = kernel(
            self.compressor.partition, z, self._compensated, self._scales, self._spare
        )
        if (
            self._in_place
        ):  # what was sent is lost if the exchange fails, but the error is still that of one round
            self._scales = self._next_scales
        return payload
