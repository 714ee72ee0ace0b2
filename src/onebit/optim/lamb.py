"""LAMB, uncompressed: the baseline of 1-bit LAMB, and its warm-up."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from onebit.comm import Communicator
from onebit.kernels.torch_ops import (
    bound,
    lamb_apply,
    lamb_direction,
    lamb_moments,
    lamb_move,
    per_block,
    square_root,
)
from onebit.layout import ALIGNMENT
from onebit.optim.adam import DistributedAdam
from onebit.optim.bucket import Bucket
from onebit.optim.run_state import Option
from onebit.optim.validation import check_bounds

# rows of ALIGNMENT elements; what is computed of so many stays in a core's second cache
PIECE = 2**12


class Lamb(DistributedAdam):
    """LAMB on the mean gradient of all ranks: the uncompressed baseline of 1-bit LAMB.

        g = mean_i g_i        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
        u = m_hat / (sqrt(v_hat) + eps) + weight_decay x
        c = clip(||x|| / ||u||, c_min, c_max)        for each tensor; 1 if a norm is 0
        x <- x - lr c u

    with m_hat, v_hat as in `DistributedAdam`. It is LAMB (You et al., ICLR 2020) as "1-bit LAMB"
    (Li et al., HiPC 2022, equation 1) uses it: the bounds are on the whole ratio, where You et al.
    bound ||x||. One all_reduce a step. `optimizer.state[p]["coefficient"]` is c of the last step,
    without unit.

    Args: as `DistributedAdam`, and
        coefficient_bounds: (c_min, c_max); (1, 1) gives Adam.
    """

    tensor_scalars = {"coefficient": 1.0}
    coefficient_bounds: tuple[float, float] = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        coefficient_bounds: tuple[float, float] = (0.01, 0.3),
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        check_bounds("coefficient_bounds", coefficient_bounds)
        self.coefficient_bounds = coefficient_bounds
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _exact_update(self, bucket: Bucket, g: torch.Tensor) -> None:
        """One step of LAMB on the mean gradient g of one bucket, which is overwritten."""
        lamb_step(bucket, g, Numbers.of(self, bucket), self.coefficient_bounds)


@dataclass
class Numbers:
    """The numbers of a step of LAMB, each a list with one float for each tensor of a bucket.

    Attributes:
        c1s, c2s: what m and v must be divided by to correct them for starting at zero.
        epsilons: eps, but above 0, so that a coordinate without gradient, whose m and v are 0,
            gives 0 rather than 0 / 0.
        the others: options of the tensors' groups.
    """

    beta1s: list[float]
    beta2s: list[float]
    lrs: list[float]
    weight_decays: list[float]
    epsilons: list[float]
    c1s: list[float]
    c2s: list[float]

    @classmethod
    def of(cls, optimizer: DistributedAdam, bucket: Bucket) -> "Numbers":
        """Those of a bucket of an optimizer, now."""
        tiny = torch.finfo(bucket.dtype).tiny
        corrections = [optimizer._corrections(bucket, group) for group in bucket.groups]
        return cls(
            bucket.per_tensor(lambda group: group["betas"][0]),
            bucket.per_tensor(lambda group: group["betas"][1]),
            bucket.per_tensor(lambda group: float(group["lr"])),
            bucket.per_tensor(lambda group: group["weight_decay"]),
            bucket.per_tensor(lambda group: max(float(group["eps"]), tiny)),
            [c1 for c1, _ in corrections],
            [c2 for _, c2 in corrections],
        )

    @property
    def roots(self) -> list[float]:
        """1 / sqrt(c2)."""
        return [c2**-0.5 for c2 in self.c2s]


def lamb_step(
    bucket: Bucket, g: torch.Tensor, numbers: Numbers, bounds: tuple[float, float]
) -> None:
    """One step of LAMB on the mean gradient g, float [layout.size], which is overwritten."""
    betas = (numbers.beta1s, _rests(numbers.beta1s), numbers.beta2s, _rests(numbers.beta2s))
    for piece in in_pieces(bucket, [g, bucket.momentum, bucket.variance], betas):
        lamb_moments(*piece)
    ratios = trust_ratios(bucket, g, numbers, bounds)
    bucket.coefficient.copy_(torch.tensor(ratios, dtype=torch.float64, device="cpu"))
    descend(bucket, g, numbers)


def trust_ratios(
    bucket: Bucket, memory: torch.Tensor, numbers: Numbers, bounds: tuple[float, float]
) -> list[float]:
    """c of each tensor, from norms that are summed in one order on all ranks.

    x and u are laid out in `memory`, float [layout.size].
    """
    x_norms = _norms(bucket, bucket.flat(bucket.params, out=memory))
    values = (numbers.c1s, numbers.roots, numbers.epsilons, numbers.weight_decays)
    for x, *rest in in_pieces(bucket, [memory, bucket.momentum, bucket.variance], values):
        x.copy_(lamb_direction(x, *rest))
    return [trust_ratio(*norms, bounds) for norms in zip(x_norms, _norms(bucket, memory))]


def trust_ratio(x_norm: float, u_norm: float, bounds: tuple[float, float]) -> float:
    """clip(||x|| / ||u||, c_min, c_max); 1 if a norm is 0."""
    low, high = bounds
    return min(max(x_norm / u_norm, low), high) if x_norm and u_norm else 1.0


def descend(
    bucket: Bucket, memory: torch.Tensor, numbers: Numbers, limits: Sequence[float] | None = None
) -> torch.Tensor:
    """x <- x - lr c u, with c the bucket's `coefficient`; `memory`: float [layout.size].

    lr c m_hat / (sqrt(v_hat) + eps), u without weight decay, is kept within +-limit of each tensor;
    None: no limits. Returns how many coordinates would have been beyond, int64 [].
    """
    bounded = torch.zeros((), dtype=torch.int64, device=bucket.device)
    rates = [lr * c for lr, c in zip(numbers.lrs, bucket.coefficient.tolist())]
    own = [rate / c1 for rate, c1 in zip(rates, numbers.c1s)]
    values = (own, numbers.roots, numbers.epsilons, limits or [math.inf] * len(own))
    for move, m, v, *rest, limit in in_pieces(
        bucket, [memory, bucket.momentum, bucket.variance], values
    ):
        move.copy_(lamb_move(m, v, *rest))
        if limits:
            bounded += bound(move, limit)
    decays = [1 - rate * decay for rate, decay in zip(rates, numbers.weight_decays)]
    for x, move, decay in zip(bucket.trained(), bucket.layout.views(memory), decays):
        if x is not None:
            lamb_apply(x, move, decay)
    return bounded


# ---- numbers of tensors, beside vectors that are processed in pieces


def in_pieces(
    bucket: Bucket, vectors: Sequence[torch.Tensor], values: Sequence[Sequence[float]]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The vectors, float [layout.size], as rows of ALIGNMENT elements, some rows at a time.

    Whole ones would need as much memory for each intermediate result. With them come the `values`,
    one float for each tensor, as columns [rows, 1]; those of the tail are 1.
    """
    rows = [x.view(-1, ALIGNMENT) for x in vectors] + [spread(bucket, value) for value in values]
    return zip(*(x.split(PIECE) for x in rows))


def spread(bucket: Bucket, values: Sequence[float]) -> torch.Tensor:
    """One float for each tensor -> T [size / ALIGNMENT, 1], one for each row; 1 for the tail."""
    numbers = torch.tensor([*values, 1.0], dtype=bucket.dtype, device=bucket.device)
    return per_block(numbers, bucket.layout.lengths)


def _rests(betas: Sequence[float]) -> list[float]:
    return [1 - beta for beta in betas]


def _norms(bucket: Bucket, x: torch.Tensor) -> list[float]:
    return square_root(bucket.tensor_sums(x, square=True)).tolist()[: len(bucket.params)]
