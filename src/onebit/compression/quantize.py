import torch
from torch import Generator, Tensor

from onebit.compression.base import Compressor
from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import per_block
from onebit.layout import ALIGNMENT, Partition

BITS = (2, 4, 8, 16)
NORMS = ("max", "l2")


class Quantize(Compressor):
    """n bits per element: equally spaced levels between -||x|| and ||x||, one norm per group.

        C[x] = ||x|| k / s,    k = s x / ||x|| rounded to a whole number,    s = 2^(n-1) - 1

    k is rounded to the nearest whole number or, with `stochastic`, at random to one of its two
    neighbours such that E C[x] = x; with the l2 norm the latter is QSGD (Alistarh et al., NeurIPS
    2017). Zero is one of the 2 s + 1 levels, so that no element changes its sign and 0 stays 0.

    For groups of d active elements

        nearest, max norm    q^2 = min((d - 1) / (4 s^2), 1 - 1/d) < 1, since the largest is exact
        nearest, l2 norm     q^2 = min(d / (4 s^2), 1)
        stochastic           q^2 = min(d / (4 s^2), sqrt(d) / s), of the mean square

    Where q is 1 or more, error feedback can let the error grow without bound: for long vectors use
    the max norm and round to the nearest, or use no feedback. A row's message is its codes k, n/8
    bytes per element, lowest bits first, then one norm for each of its pieces, then zeros up to a
    multiple of 16 bytes.

    Args:
        bits: n, one of 2, 4, 8, 16.
        norm: "max" or "l2".
        stochastic: whether to round at random.
        seed: of the random draws; a whole number of at least 0.

    Raises ValueError if an option is none of these.
    """

    def __init__(
        self,
        partition: Partition,
        dtype: torch.dtype,
        bits: int = 8,
        norm: str = "max",
        stochastic: bool = False,
        seed: int = 0,
    ):
        super().__init__(partition, dtype)
        if bits not in BITS or norm not in NORMS or not isinstance(stochastic, bool):
            raise ValueError(
                f"Quantize takes bits among {BITS}, norm among {NORMS} and stochastic True or "
                f"False, not bits={bits!r}, norm={norm!r}, stochastic={stochastic!r}"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, not {seed!r}")
        self.bits, self.norm, self.levels = bits, norm, 2 ** (bits - 1) - 1
        self.seed = seed if stochastic else None
        self.row_bytes = partition.row_bytes(bits, dtype.itemsize)
        # of the codes in a byte
        self._shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=partition.mask.device)

    def compress(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        norms = self._norms(x).to(self.dtype)
        units = per_block(torch.where(norms == 0, 1, norms), self.partition.lengths)
        k = (x.view(-1, ALIGNMENT) / units * self.levels).flatten()
        k = k.round() if self.seed is None else _rounded_at_random(k, generator)
        # The squares of numbers near 1e-162 underflow, so that their norm may be too small.
        k = k.clamp(-self.levels, self.levels)
        return torch_ops.join_payload(self.partition, self._pack(k.to(torch.int16)), norms)

    def decompress(self, payload: Tensor) -> Tensor:
        codes, norms = torch_ops.split_payload(self.partition, payload, self.dtype, self.bits)
        k = self._unpack(codes).to(self.dtype)
        blocks = k.view(*k.shape[:-1], -1, ALIGNMENT) / self.levels
        return (blocks * per_block(norms, self.partition.piece_lengths.flatten())).flatten(-2)

    def scales(self, payload: Tensor) -> Tensor:
        return torch_ops.split_payload(self.partition, payload, self.dtype, self.bits)[1]

    def error_bound(self) -> Tensor:
        d, s = self.partition.counts, self.levels
        if self.seed is not None:
            return torch.minimum(d / (4 * s**2), d.sqrt() / s).sqrt()
        if self.norm == "max":
            return torch.minimum((d - 1) / (4 * s**2), 1 - 1 / d).sqrt()
        return (d / (4 * s**2)).clamp(max=1).sqrt()

    def _norms(self, x):
        """The norm of each group, [groups]."""
        if self.norm == "l2":
            sums = torch_ops.block_sums(self.partition, x)
            return torch_ops.square_root(torch_ops.group_sums(self.partition, sums))
        largest = x.abs().view(-1, ALIGNMENT).amax(1)
        return torch.segment_reduce(
            largest, "max", lengths=self.partition.lengths // ALIGNMENT, initial=0
        )

    def _pack(self, k):
        """int16 [n] -> its lowest `bits` bits, uint8 [n bits / 8]."""
        if self.bits == 16:
            return k.view(torch.uint8)
        fields = (k & 2**self.bits - 1).to(torch.uint8).view(-1, len(self._shifts))
        return (fields << self._shifts).sum(1, dtype=torch.uint8)

    def _unpack(self, codes):
        """uint8 [..., n bits / 8] -> int8 or int16 [..., n]."""
        if self.bits == 16:
            return codes.view(torch.int16)
        # The code moves to the top of its byte; the shift back to the right extends its sign.
        top = codes[..., None] << 8 - self.bits - self._shifts
        return (top.view(torch.int8) >> 8 - self.bits).flatten(-2)


def _rounded_at_random(k, generator):
    """k rounded to a neighbouring whole number, up with probability k - floor(k)."""
    low = k.floor()
    draws = torch.rand(len(k), generator=generator, dtype=k.dtype, device=k.device)
    return low + (draws < k - low)
