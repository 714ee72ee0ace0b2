"""Local SGD."""

from collections.abc import Iterable

import torch

from onebit.allreduce import ExactAllreduce
from onebit.comm import Communicator
from onebit.optim.baselines.sgd import DistributedSGD
from onebit.optim.bucket import Bucket
from onebit.optim.local_steps import LocalSteps, take_parameters
from onebit.optim.run_state import Option
from onebit.optim.validation import check_whole


class LocalSGD(LocalSteps, DistributedSGD):
    """Local SGD (Stich, 2019): every rank trains a model of its own, and every tau steps the models
    and their momenta are averaged.

        m_i <- momentum m_i + (1 - dampening) (g_i + weight_decay x_i)        at every step
        x_i <- x_i - lr m_i
        x_i <- mean_j x_j        m_i <- mean_j m_j        after the steps tau, 2 tau, ...

    "Local SGD" and "Local SGD with Momentum" of "1-bit Adam", Figures 10 and 11. Only the steps
    that average send anything: two all_reduces, of x and of m, in the vectors' type, which is
    float32 or float64 whatever the parameters'. If the momentum is 0, that of m is left out, and m
    set to 0. Skipped steps do not count.

    Between two averages gradients are clipped by each rank's own norm and one that is not finite
    counts as zero; in a step that averages the ranks agree on both first. `synchronize()` averages
    now: before evaluation, or so that one checkpoint serves all ranks.

    Args: as `DistributedSGD`, and
        tau: steps from one average to the next, at least 1; math.inf: average only on
            `synchronize()`.
        max_grad_norm: between averages it bounds the norm of each rank's own gradient, in a step
            that averages sqrt(mean_i ||g_i||^2).

    A group with compress=False is trained by `DistributedSGD` at every step.
    """

    tau: float = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        tau: float = 4,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        communicator: Communicator | None = None,
    ) -> None:
        check_whole("tau", tau, 1)
        self.tau = tau
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            communicator=communicator,
        )

    def _meets_next(self) -> bool:
        return (self.steps + 1) % self.tau == 0

    def _local_update(self, bucket: Bucket, factor: float) -> None:
        self._exact_update(bucket, self._own_gradient(bucket, factor))

    def _finish_step(self) -> None:
        self._run.is_synced = not self._compressed
        if self.steps % self.tau == 0:
            self._sync()

    def _sync(self) -> None:
        """x_i <- mean_j x_j and m_i <- mean_j m_j."""
        run = self._run
        for bucket in self._compressed:
            take_parameters(run, bucket, self._mean(bucket.flat(bucket.params)))
            if any(group["momentum"] for group, _ in bucket.spans):
                self._mean(bucket.momentum)
            else:
                bucket.momentum.zero_()
        run.moved.clear()
        run.is_synced = True

    def _common_between_syncs(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        return [{} for _ in bucket.params]

    def _mean(self, vector: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks, in its place."""
        allreduce = ExactAllreduce(self.communicator).allreduce
        return self._run.runner.submit(allreduce, vector).result()
