"""What the baselines share whose momentum is compressed while the variance goes on."""

import torch

from onebit.kernels.torch_ops import apply_moves
from onebit.optim.adam import DistributedAdam
from onebit.optim.bucket import Bucket
from onebit.optim.optimizer import scaled


def local_variance(bucket: Bucket, factor: float) -> torch.Tensor:
    """v_i = beta2 v + (1 - beta2) (factor g_i)^2, a new vector."""
    variance = scaled(bucket.flat_gradient(), factor).square()
    for group, span in bucket.spans:
        beta2 = group["betas"][1]
        variance[span].mul_(1 - beta2).add_(bucket.variance[span] * beta2)
    return variance


def corrected(optimizer: DistributedAdam, bucket: Bucket, variance: torch.Tensor) -> torch.Tensor:
    """`variance` divided by 1 - beta2^t, or by 1, in place."""
    for group, span in bucket.spans:
        variance[span] /= optimizer._corrections(bucket, group)[1]
    return variance


def take_momentum_and_move(
    optimizer: DistributedAdam, bucket: Bucket, gathered: torch.Tensor, variance: torch.Tensor
) -> None:
    """m is what was gathered; x <- decay x - (lr / c1) m / (sqrt(variance) + eps)."""
    decays, rates, epsilons = optimizer._update_factors(bucket)
    moves = bucket.allreduce.decode(gathered)
    bucket.momentum.copy_(moves)
    for view, rate in zip(bucket.layout.views(moves), rates):
        view *= rate
    apply_moves(bucket.partition, bucket.trained(), variance, moves, decays, epsilons)
