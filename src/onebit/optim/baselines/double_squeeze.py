"""DoubleSqueeze."""

from collections.abc import Iterable
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms
from onebit.optim.baselines.sgd import descend, with_weight_decay
from onebit.optim.bucket import Bucket
from onebit.optim.optimizer import DistributedOptimizer, scaled
from onebit.optim.run_state import Option


class DoubleSqueeze(DistributedOptimizer):
    """SGD on error-compensated compressed *gradients* (Tang et al., ICML 2019).

        x <- x - lr C-allreduce(g_i + weight_decay x)

    They are squeezed on the way to the server and on the way back, see
    `onebit.allreduce.CompressedAllreduce`. Compressed from the first step, without momentum. The
    worker and server errors are in units of the gradient. A step is three collectives: 16 bytes of
    agreement, then one all_to_all and one all_gather of n / 8 bytes together with one scale per
    tensor.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: learning rate.
        weight_decay: coupled, a part of what is compressed.
        max_grad_norm: bounds sqrt(mean_i ||g_i||^2), since the mean gradient is not known; it clips
            by one factor on all ranks.
        check_finite: skip a step, on all ranks, if a gradient on any rank is not finite.
        compressor: see `onebit.compression`; None: `Sign`.
        bucket_cap_mb, overlap: as `OneBitAdam`'s.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single
            worker.

    A group with compress=False is trained by SGD on the exact mean gradient. Raises TypeError or
    ValueError, with the remedy, if an option or a parameter is wrong.
    """

    vectors = {}
    sent_options = ("weight_decay",)
    compresses = compresses_from_the_start = True
    compressor: Any = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
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
            {"lr": lr, "weight_decay": weight_decay},
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _terms(self, bucket: Bucket, factor: float) -> Terms:
        return bucket.terms(with_weight_decay(bucket, scaled(bucket.flat_gradient(), factor)))

    def _compressed_update(self, bucket: Bucket, outcome: torch.Tensor) -> None:
        descend(bucket, bucket.allreduce.decode(outcome))

    def _exact_update(self, bucket: Bucket, g: torch.Tensor) -> None:
        descend(bucket, with_weight_decay(bucket, g))
