"""Adam with n-bit variance compression."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onebit.allreduce import CompressedAllreduce
from onebit.comm import Communicator
from onebit.compression import Quantize, Sign
from onebit.optim.adam import DistributedAdam
from onebit.optim.baselines.compressed_momentum import (
    corrected,
    local_variance,
    take_momentum_and_move,
)
from onebit.optim.bucket import Bucket
from onebit.optim.run_state import Option, RunState
from onebit.optim.validation import check_compressor

QSGD = partial(Quantize, bits=8, norm="l2", stochastic=True)


@dataclass(eq=False)
class QuantizedVarianceRun(RunState):
    """Attributes:
    variance_allreduces: for each compressed bucket that of its variance.
    """

    variance_allreduces: dict[Bucket, CompressedAllreduce] = field(default_factory=dict)


class QuantizedVarianceAdam(DistributedAdam):
    """Adam with n-bit variance compression, which needs 16 bits ("1-bit Adam", Figure 12).

        m   = C-allreduce(beta1 m + (1 - beta1) g_i)        1 bit, with worker and server error
        v_i = beta2 v + (1 - beta2) g_i^2
        v   = Q[mean_i Q[v_i]]                              n bits, without errors
        x  <- (1 - lr weight_decay) x - lr m_hat / (sqrt(v_hat) + eps)

    with m_hat and v_hat as in `DistributedAdam`. Compressed from the first step. It is Adam on the
    mean of the *squared local* gradients, as nobody knows the mean gradient. Q keeps v >= 0. Where
    it rounds v to 0, x moves by m / eps: that is how few bits fail, so nothing is done about it; a
    larger eps bounds it.

    A step is five collectives: 16 bytes of agreement, then an all_to_all and an all_gather for each
    of m and v.

    Args: as `DistributedAdam`, and
        compressor: C, of the momentum; see `onebit.compression`. None: `Sign`; `Identity` sends it
            as it is.
        variance_compressor: Q; None: QSGD at 8 bits,
            `Quantize(bits=8, norm="l2", stochastic=True)`, which is right on average. One that is
            not should be close, as what it loses is lost.
    """

    run_state = QuantizedVarianceRun
    compresses = compresses_from_the_start = True
    compressor: Any = Option()
    variance_compressor: Any = Option()

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
        variance_compressor: Any = None,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        self.compressor = compressor or Sign
        self.variance_compressor = variance_compressor or QSGD
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

    def _lay_out(self, moments: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        super()._lay_out(moments)
        for bucket in self._compressed[:1]:
            check_compressor(
                self.variance_compressor, bucket.partition, bucket.dtype, "variance_compressor"
            )
        self._run.variance_allreduces = {
            bucket: CompressedAllreduce(
                self.communicator,
                bucket.layout,
                bucket.dtype,
                self.variance_compressor,
                feedback=False,
                rounds=self.steps,
                stream=len(self._run.buckets) + i,
                check_scales=False,  # few bits may fail until v overflows
            )
            for i, bucket in enumerate(self._compressed)
        }

    def _start_compressed_exchange(self, bucket: Bucket, factor: float) -> Future:
        """The future's result is (payload of the momentum, payload of the variance)."""
        momentum, variance = bucket.allreduce, self._run.variance_allreduces[bucket]
        payload = momentum.compress(self._terms(bucket, factor))
        variance_payload = variance.compress(bucket.terms(local_variance(bucket, factor)))

        def exchange(
            payload: torch.Tensor, variance_payload: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return momentum.exchange(payload), variance.exchange(variance_payload)

        return self._run.runner.submit(exchange, payload, variance_payload)

    def _compressed_update(
        self, bucket: Bucket, outcome: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        gathered, gathered_variance = outcome
        allreduce = self._run.variance_allreduces[bucket]
        allreduce.commit()
        bucket.variance.copy_(allreduce.decode(gathered_variance))
        variance = corrected(self, bucket, bucket.variance.clone())
        take_momentum_and_move(self, bucket, gathered, variance)
