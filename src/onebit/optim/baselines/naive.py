"""Adam on compressed gradients."""

from collections.abc import Iterable
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms
from onebit.optim.adam import DistributedAdam
from onebit.optim.bucket import Bucket
from onebit.optim.run_state import Option


class NaiveOneBitAdam(DistributedAdam):
    """Adam on error-compensated 1-bit *gradients*: the baseline that falls behind.

        g = C-allreduce(g_i)        then Adam as `DistributedAdam`

    so that both m and v follow the compressed gradient ("1-bit Adam", section 3.2 and Figures 1 and
    6). Compressed from the first step. Section 4.2 of the paper says why it fails: v takes in
    (delta_{t-1} - delta_t)^2, which does not cancel over the steps. The worker and server errors
    are in units of the gradient.

    Args: as `DistributedAdam`, and
        compressor: see `onebit.compression`; None: `Sign`.
    """

    compresses = compresses_from_the_start = True
    compressor: Any = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
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

    def _terms(self, bucket: Bucket, factor: float) -> Terms:
        return Terms(bucket.gradients(), [factor] * len(bucket.params))

    def _compressed_update(self, bucket: Bucket, outcome: torch.Tensor) -> None:
        self._exact_update(bucket, bucket.allreduce.decode(outcome))
