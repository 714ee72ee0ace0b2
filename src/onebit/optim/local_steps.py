"""Steps that send nothing, between syncs."""

import torch

from onebit.allreduce import ExactAllreduce
from onebit.optim.agreement import unscaling
from onebit.optim.bucket import Bucket
from onebit.optim.optimizer import DistributedOptimizer, scaled
from onebit.optim.run_state import RunState


class LocalSteps(DistributedOptimizer):
    """A `DistributedOptimizer` that takes local steps between syncs.

    Between syncs every rank trains a model of its own, on its own gradients, clipped by their own
    norm; a gradient that is not finite counts as zero there. In a step in which the ranks meet they
    agree first, clip by one factor and skip the step together. Groups with compress=False are
    averaged exactly at every step.

    A subclass gives `_meets_next` and `_local_update`, and what `trains_apart` asks for.
    """

    trains_apart = True

    def _meets_next(self) -> bool:
        """Whether the ranks exchange anything of the compressed groups in the next step."""
        raise NotImplementedError

    def _local_update(self, bucket: Bucket, factor: float) -> None:
        """A step of one compressed bucket, with this rank's gradients times `factor`."""
        raise NotImplementedError

    def _take_step(self) -> bool:
        factor, masked = self._agree() if self._meets_next() else (self._own_factor(), 0)
        if factor is None:
            return False
        self._warn_of_masked_gradients(masked)
        self._begin_change()
        self._count_step()
        for bucket in self._run.buckets:
            if bucket.compress:
                self._local_update(bucket, factor)
            else:
                g = self._own_gradient(bucket, factor)
                self._exact_update(bucket, self._exact_mean(bucket, g))
        note_moved(self._run)
        return True

    def _own_factor(self) -> float:
        """The clipping factor of this rank's gradients alone; 0 if they are not finite."""
        if not self._needs_norm:
            return 1.0
        unscale = unscaling(self)
        squared_norm = sum(float(self._measure(bucket)[0]) for bucket in self._run.buckets)
        return self._factor(unscale**2 * squared_norm, unscale) or 0.0

    def _own_gradient(self, bucket: Bucket, factor: float) -> torch.Tensor:
        """This rank's gradients times `factor`, flat; a factor of 0 makes zeros of anything."""
        g = bucket.flat_gradient()
        return scaled(g, factor) if factor else g.zero_()

    def _exact_mean(self, bucket: Bucket, x: torch.Tensor) -> torch.Tensor:
        """The mean of x over the ranks, in its place."""
        allreduce = ExactAllreduce(self.communicator, self._wire_dtype(bucket)).allreduce
        return self._run.runner.submit(allreduce, x).result()


def note_moved(run: RunState) -> None:
    """The ranks have trained the compressed groups' parameters apart."""
    for bucket in run.buckets:
        if bucket.compress:
            run.moved.update(x for x in bucket.trained() if x is not None)


def take_parameters(run: RunState, bucket: Bucket, mean: torch.Tensor) -> None:
    """x <- its part of `mean`, float [layout.size], which is the mean over the ranks.

    What no rank has trained stays as it is, since a mean of equal numbers may round.
    """
    for x, value in zip(bucket.params, bucket.layout.views(mean)):
        if x in run.moved:
            x.copy_(value)
