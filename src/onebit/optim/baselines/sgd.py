"""Stochastic gradient descent, uncompressed."""

from collections.abc import Iterable

import torch

from onebit.comm import Communicator
from onebit.optim.bucket import Bucket
from onebit.optim.optimizer import DistributedOptimizer


class DistributedSGD(DistributedOptimizer):
    """Stochastic gradient descent with momentum on the mean gradient of all ranks.

        g = mean_i g_i
        m <- momentum m + (1 - dampening) (g + weight_decay x)
        x <- x - lr m

    One all_reduce a step. With one rank it equals torch.optim.SGD (Polyak, 1964), except that a
    gradient that is None counts as zero here, and that dampening holds from the first step and for
    momentum 0 too, where torch takes the gradient as it is. m is 0 at the start, in units of the
    gradient.

    Args:
        params: parameters, named parameters, or groups of them.
        lr, momentum, dampening, weight_decay: as torch.optim.SGD's; weight decay is coupled, a part
            of the gradient. Each may differ between groups and is read at every step.
        max_grad_norm: clip the mean gradient, without weight decay, to this l2 norm.
        check_finite: skip a step, on all ranks, if the gradient is not finite.
        bucket_cap_mb, overlap: as `DistributedAdam`'s.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single
            worker.

    Raises TypeError or ValueError, with the remedy, if an option or a parameter is wrong.
    """

    vectors = {"momentum": "momentum_buffer"}
    sent_options: tuple[str, ...] = ()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _exact_update(self, bucket: Bucket, g: torch.Tensor) -> None:
        bucket.momentum.copy_(next_momentum(bucket, g))
        descend(bucket, bucket.momentum)


def with_weight_decay(bucket: Bucket, g: torch.Tensor) -> torch.Tensor:
    """g + weight_decay x, in g's place."""
    for group, x, view in zip(bucket.groups, bucket.trained(), bucket.layout.views(g)):
        if x is not None and group["weight_decay"]:
            view.add_(x.to(bucket.dtype) * group["weight_decay"])
    return g


def next_momentum(bucket: Bucket, g: torch.Tensor) -> torch.Tensor:
    """momentum m + (1 - dampening) (g + weight_decay x), in g's place."""
    with_weight_decay(bucket, g)
    for group, span in bucket.spans:
        g[span].mul_(1 - group["dampening"]).add_(bucket.momentum[span] * group["momentum"])
    return g


def descend(bucket: Bucket, direction: torch.Tensor) -> None:
    """x <- x - lr direction, in place; rounded once to x's own type."""
    for group, x, view in zip(bucket.groups, bucket.trained(), bucket.layout.views(direction)):
        if x is not None:
            x.copy_(x.to(bucket.dtype) - view * float(group["lr"]))
