"""Adam whose variance is averaged only now and then."""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from onebit.allreduce import ExactAllreduce
from onebit.comm import Communicator
from onebit.compression import Sign
from onebit.optim.adam import DistributedAdam
from onebit.optim.baselines.compressed_momentum import (
    corrected,
    local_variance,
    take_momentum_and_move,
)
from onebit.optim.bucket import Bucket
from onebit.optim.local_steps import note_moved, take_parameters
from onebit.optim.run_state import Option
from onebit.optim.validation import check_choice, check_whole


class Outcome(NamedTuple):
    """What a bucket's exchange gives: the momentum's payload, this rank's variance, and the
    averages of variance and parameters; None: not due."""

    gathered: torch.Tensor
    variance: torch.Tensor
    average: torch.Tensor | None
    parameters: torch.Tensor | None


class LazyVarianceAdam(DistributedAdam):
    """Adam with lazily updated variance: a baseline that falls behind ("1-bit Adam", Figure 13).

        m   = C-allreduce(beta1 m + (1 - beta1) g_i)        1 bit, with worker and server error
        v_i <- beta2 v_i + (1 - beta2) g_i^2                every tau steps then v_i <- mean_i v_i
        x_i <- (1 - lr weight_decay) x_i - lr m_hat / (sqrt(v_hat_i) + eps)

    with m_hat and v_hat as in `DistributedAdam`; the mean of v_i is exact. Which variance a worker
    divides by is not in the paper:

        steps_with="own"      its own v_i. The parameters x_i differ between averages; they are
                              averaged when v_i is, before the step
        steps_with="average"  the last average, v_hat as of then; until there is one, that of the
                              first step. The parameters never differ

    Where the divisor is 0 x only decays, since 1 bit cannot say zero. Averages are due at the steps
    tau, 2 tau, ... Between them the ranks' state differs: call `synchronize()` on all ranks before
    evaluation, and before saving one checkpoint for all. A step is three collectives, as
    `OneBitAdam`'s; one with an average has an exact all_reduce of v_i more, and of x_i with
    steps_with="own".

    Args: as `DistributedAdam`, and
        tau: steps from average to average, at least 1.
        steps_with: "own" or "average".
        compressor: C, of the momentum; see `onebit.compression`. None: `Sign`; `Identity` sends it
            as it is.
    """

    compresses = compresses_from_the_start = trains_apart = True
    tau: float = Option()
    steps_with: str = Option()
    compressor: Any = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        tau: float = 3,
        steps_with: str = "own",
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        compressor: Any = None,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        check_whole("tau, the number of steps from average to average,", tau, 1)
        check_choice("steps_with", steps_with, ("own", "average"))
        self.tau, self.steps_with = tau, steps_with
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

    @property
    def more_vectors(self) -> dict[str, str]:  # type: ignore[override]
        """With steps_with="average" the last average, bias-corrected."""
        return {"average": "average_exp_avg_sq"} if self.steps_with == "average" else {}

    # ---- a step

    def _is_due(self, step: int) -> bool:
        return step % self.tau == 0

    def _start_compressed_exchange(self, bucket: Bucket, factor: float) -> Future:
        """The future's result is an `Outcome`."""
        payload = bucket.allreduce.compress(self._terms(bucket, factor))
        variance, due = local_variance(bucket, factor), self._is_due(self.steps + 1)
        own = self.steps_with == "own"
        averages = due if own else due or not bucket.average.any()
        average = variance.clone() if averages else None
        parameters = bucket.flat(bucket.params) if own and due else None
        return self._run.runner.submit(
            self._exchange, bucket.allreduce, payload, variance, average, parameters
        )

    def _exchange(
        self,
        allreduce: Any,
        payload: torch.Tensor,
        variance: torch.Tensor,
        average: torch.Tensor | None,
        parameters: torch.Tensor | None,
    ) -> Outcome:
        gathered = allreduce.exchange(payload)
        exact = ExactAllreduce(self.communicator)
        means = (None if x is None else exact.allreduce(x) for x in (average, parameters))
        return Outcome(gathered, variance, *means)

    def _compressed_update(self, bucket: Bucket, outcome: Outcome) -> None:
        gathered, variance, average, parameters = outcome
        due = average is not None and self._is_due(self.steps)
        bucket.variance.copy_(average if due else variance)
        if parameters is not None:
            take_parameters(self._run, bucket, parameters)
        if self.steps_with == "own":
            divisor = corrected(self, bucket, bucket.variance.clone())
        else:
            if average is not None:
                bucket.average.copy_(corrected(self, bucket, average))
            divisor = bucket.average
        divisor = torch.where(divisor > 0, divisor, torch.inf)
        take_momentum_and_move(self, bucket, gathered, divisor)

    def _finish_step(self) -> None:
        run = self._run
        run.is_synced = self._is_due(self.steps)
        if run.is_synced:
            run.moved.clear()
        else:
            note_moved(run)

    # ---- between averages

    def _common_between_syncs(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """The variance is each rank's own, and with steps_with="own" the parameters are."""
        common = [
            {name: value for name, value in entries.items() if name != "exp_avg_sq"}
            for entries in bucket.everything()
        ]
        if self.steps_with == "own":
            return common
        return [{"the parameter": p} | entries for p, entries in zip(bucket.params, common)]

    def _sync(self) -> None:
        """An average out of turn.

        The last average that steps_with="average" divides by stays the last one that was due.
        """
        run, exact = self._run, ExactAllreduce(self.communicator)
        for bucket in self._compressed:
            exact.allreduce(bucket.variance)
            if self.steps_with == "own":
                take_parameters(run, bucket, exact.allreduce(bucket.flat(bucket.params)))
        run.moved.clear()
        run.is_synced = True
