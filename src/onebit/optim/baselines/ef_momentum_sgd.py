"""Momentum SGD whose momentum is compressed with error feedback."""

from collections.abc import Iterable
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms
from onebit.optim.baselines.sgd import DistributedSGD, descend, next_momentum
from onebit.optim.bucket import Bucket
from onebit.optim.optimizer import scaled
from onebit.optim.run_state import Option


class EFMomentumSGD(DistributedSGD):
    """Momentum SGD whose momentum is sent compressed, with error feedback.

        m_i = momentum m + (1 - dampening) (g_i + weight_decay x)
        m   = C-allreduce(m_i)        see `onebit.allreduce.CompressedAllreduce`
        x  <- x - lr m

    "EF Momentum SGD" of "1-bit Adam" (after Zheng et al., 2019). Compressed from the first step. As
    in line 6 of 1-bit Adam, m is the common momentum of the last step; with dampening = momentum =
    beta1 this is 1-bit Adam with v = 1. The worker and server errors are in units of the momentum.
    A step is three collectives, as `DoubleSqueeze`'s.

    Args: as `DistributedSGD`, and
        max_grad_norm: bounds sqrt(mean_i ||g_i||^2), since the mean gradient is not known; it clips
            by one factor on all ranks.
        compressor: see `onebit.compression`; None: `Sign`.
        bucket_cap_mb, overlap: as `OneBitAdam`'s.

    A group with compress=False is trained by `DistributedSGD`.
    """

    sent_options = ("momentum", "dampening", "weight_decay")
    compresses = compresses_from_the_start = True
    compressor: Any = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        compressor: Any = None,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        self.compressor = compressor or Sign
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _terms(self, bucket: Bucket, factor: float) -> Terms:
        return bucket.terms(next_momentum(bucket, scaled(bucket.flat_gradient(), factor)))

    def _compressed_update(self, bucket: Bucket, outcome: torch.Tensor) -> None:
        bucket.momentum.copy_(bucket.allreduce.decode(outcome))
        descend(bucket, bucket.momentum)
