from onebit.optim.steps import SteppingOptimizer


class DistributedSGD(SteppingOptimizer):
    """Stochastic gradient descent with momentum on the mean gradient of all ranks: the uncompressed baseline.

        g = mean_i g_i        m <- momentum m + (1 - dampening) (g + weight_decay x)        x <- x - lr m

    One all_reduce a step. With one rank it equals torch.optim.SGD (Polyak, 1964), but that a gradient that is None counts as zero here, and
    that dampening holds from the first step and for momentum 0 too, where torch takes the gradient as it is. m is 0 at the start, in the
    units of the gradient.

    Args:
        lr, momentum, dampening, weight_decay: as torch.optim.SGD's; weight decay is coupled, a part of the gradient. Each may differ
            between groups and is read at every step.
        max_grad_norm: clip the mean gradient, without weight decay, to this l2 norm.
        check_finite: skip a step, on all ranks, if the gradient is not finite.
        bucket_cap_mb, overlap: as `DistributedAdam`'s.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    vectors = {"momentum": "momentum_buffer"}
    sent_options = ()

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        *,
        max_grad_norm=None,
        check_finite=True,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
            unknown=unknown,
        )

    def _exact_update(self, part, g):
        part.momentum.copy_(next_momentum(part, g))
        descend(part, part.momentum)


def with_weight_decay(part, g):
    """g + weight_decay x, in g's place."""
    for group, x, view in zip(part.groups, part.trained(), part.layout.views(g)):
        if x is not None and group["weight_decay"]:
            view.add_(x.to(part.dtype) * group["weight_decay"])
    return g


def next_momentum(part, g):
    """momentum m + (1 - dampening) (g + weight_decay x), in g's place."""
    with_weight_decay(part, g)
    for group, span in part.spans:
        g[span].mul_(1 - group["dampening"]).add_(part.momentum[span] * group["momentum"])
    return g


def descend(part, direction):
    """x <- x - lr direction, in place; rounded once to x's own type."""
    for group, x, view in zip(part.groups, part.trained(), part.layout.views(direction)):
        if x is not None:
            x.copy_(x.to(part.dtype) - view * float(group["lr"]))
