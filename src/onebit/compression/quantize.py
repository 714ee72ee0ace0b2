import torch

from onebit.compression.base import Compressor
from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import per_block
from onebit.layout import ALIGNMENT

BITS = (2, 4, 8, 16)
NORMS = ("max", "l2")


class Quantize(Compressor):
    """n bits per element: 2 s + 1 equally spaced levels, s = 2^(n-1) - 1, between -||x|| and ||x||, one norm per group.

        C[x] = ||x|| k / s        k = s x / ||x|| rounded to a whole number

    Rounded to the nearest, or by lot to one of the two neighbours, so that E C[x] = x. The latter with the l2 norm is QSGD (Alistarh et
    al., NeurIPS 2017). Zero is a level, so that no element changes its sign, and 0 stays 0.

    For groups of d active elements

        nearest, max norm    q^2 = min((d - 1) / (4 s^2), 1 - 1/d), below 1: the largest element comes out whole
        nearest, l2 norm     q^2 = min(d / (4 s^2), 1)
        by lot               q^2 = min(d / (4 s^2), sqrt(d) / s), of the mean square

    Where q is 1 or more, error feedback may let the error grow without end: give long vectors the max norm and the nearest level, or no
    feedback. A row's message is its codes k, n/8 bytes an element, lowest bits first, then one norm for each of its pieces.

    Args:
        bits: n, one of 2, 4, 8, 16.
        norm: "max" or "l2".
        stochastic: round by lot.
        seed: of the lots; a whole number of at least 0.
    """

    def __init__(self, partition, dtype, bits=8, norm="max", stochastic=False, seed=0):
        super().__init__(partition, dtype)
        if bits not in BITS or norm not in NORMS or not isinstance(stochastic, bool):
            raise ValueError(
                f"Quantize takes bits among {BITS}, norm among {NORMS} and stochastic True or False, not bits={bits!r}, "
                f"norm={norm!r}, stochastic={stochastic!r}"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, not {seed!r}")
        self.bits, self.norm, self.levels = bits, norm, 2 ** (bits - 1) - 1
        self.seed = seed if stochastic else None
        self.row_bytes = (
            partition.row_elements * bits // 8 + partition.piece_lengths.shape[1] * dtype.itemsize
        )
        self._shifts = torch.arange(
            0, 8, bits, dtype=torch.uint8, device=partition.mask.device
        )  # of the codes in a byte

    def compress(self, x, generator=None):
        norms = self._norms(x).to(self.dtype)
        units = per_block(torch.where(norms == 0, 1, norms), self.partition.lengths)
        k = (x.view(-1, ALIGNMENT) / units * self.levels).flatten()
        k = k.round() if self.seed is None else self._by_lot(k, generator)
        k = k.clamp(
            -self.levels, self.levels
        )  # numbers near 1e-162 have hardly a square: their norm may come out smaller than they are
        return torch_ops.join_payload(self.partition, self._pack(k.to(torch.int16)), norms)

    def decompress(self, payload):
        codes, norms = torch_ops.split_payload(self.partition, payload, self.dtype, self.bits)
        k = self._unpack(codes).to(self.dtype)
        blocks = k.view(*k.shape[:-1], -1, ALIGNMENT) / self.levels
        return (blocks * per_block(norms, self.partition.piece_lengths.flatten())).flatten(-2)

    def error_bound(self):
        d, s = self.partition.counts, self.levels
        if self.seed is not None:
            return torch.minimum(d / (4 * s**2), d.sqrt() / s).sqrt()
        if self.norm == "max":
            return torch.minimum((d - 1) / (4 * s**2), 1 - 1 / d).sqrt()
        return (d / (4 * s**2)).clamp(max=1).sqrt()

    def _norms(self, x):
        """The norm of each group, [groups]."""
        if self.norm == "l2":
            return torch_ops.square_root(
                torch_ops.group_sums(self.partition, torch_ops.block_sums(self.partition, x))
            )
        largest = x.abs().view(-1, ALIGNMENT).amax(1)
        return torch.segment_reduce(
            largest, "max", lengths=self.partition.lengths // ALIGNMENT, initial=0
        )

    def _by_lot(self, k, generator):
        """To one of the two whole numbers beside k, to the upper one with probability k - floor(k)."""
        low = k.floor()
        return low + (
            torch.rand(len(k), generator=generator, dtype=k.dtype, device=k.device) < k - low
        )

    def _pack(self, k):
        """int16 [n] -> its lowest `bits` bits, uint8 [n bits / 8]."""
        if self.bits == 16:
            return k.view(torch.uint8)
        fields = (k & 2**self.bits - 1).to(torch.uint8).view(-1, len(self._shifts))
        return (fields << self._shifts).sum(1, dtype=torch.uint8)

    def _unpack(self, codes):
        """uint8 [..., n bits / 8] -> int8 or int16 [..., n]; the shift to the right brings the sign along."""
        if self.bits == 16:
            return codes.view(torch.int16)
        return (
            (codes[..., None] << 8 - self.bits - self._shifts).view(torch.int8) >> 8 - self.bits
        ).flatten(-2)
