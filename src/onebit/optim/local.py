import torch

from onebit.allreduce import ExactAllreduce
from onebit.optim.steps import scaled


class LocalSteps:
    """Steps that send nothing, between syncs: a mixin that goes before a `SteppingOptimizer`.

    Between syncs every rank trains a model of its own, on its own gradients, clipped by their own norm; a gradient that is not finite
    counts as zero there. In a step in which the ranks meet they agree first, clip by one factor and skip the step together. Groups with
    compress=False are averaged exactly at every step.

    A subclass gives
        `_meets_next()`: whether the ranks exchange anything of the compressed groups in the next step;
        `_local_update(part, factor)`: a part's step, with this rank's gradients times `factor`;
        `_finish_step()`: what follows once all parts have taken it.
        `_sync()`: a sync between steps.
    """

    _is_synced = True  # whether all ranks hold the same state

    def _take_step(self):
        factor, late = self._agree() if self._meets_next() else (self._own_factor(), 0)
        if factor is None:
            return False
        if late:
            self._warn_of_late_gradients(late)
        self._count_step()
        for part in self._parts:
            if part.compress:
                self._local_update(part, factor)
            else:
                self._exact_update(part, self._exact_mean(part, self._own_gradient(part, factor)))
        self._note_moved()
        self._finish_step()
        return True

    def _note_moved(self):
        self._moved.update(x for part in self._compressed for x in part.trained() if x is not None)

    def _build(self, moments):
        super()._build(moments)
        self._moved = set()  # parameters that the ranks have trained apart

    def _take_parameters(self, part, vector):
        """x <- its part of `vector`, the mean over the ranks. What no rank has trained stays: a mean of equal numbers may round."""
        for x, value in zip(part.params, part.layout.views(vector)):
            if x in self._moved:
                x.copy_(value)

    def _own_factor(self):
        """The clipping factor of this rank's gradients alone; 0 if they are not finite."""
        if not self._needs_norm:
            return 1.0
        unscaling = self._unscaling()
        return (
            self._factor(
                unscaling**2 * sum(float(self._measure(part)[0]) for part in self._parts), unscaling
            )
            or 0.0
        )

    def _own_gradient(self, part, factor):
        """This rank's gradients times `factor`, flat; a factor of 0 makes zeros of whatever they are."""
        return scaled(part.flat_gradient(), factor) if factor else part.flat_gradient().zero_()

    def _exact_mean(self, part, x):
        """The mean of x over the ranks, in its place."""
        return self._runner.submit(
            ExactAllreduce(self.communicator, self._wire_dtype(part)).allreduce, x
        ).result()

    @torch.no_grad()
    def synchronize(self):
        """Sync now: before evaluation, and before a checkpoint that is to serve all ranks. All ranks must call it, between the same steps."""
        if not self._is_synced:
            self._sync()
        super().synchronize()

    def _relayout(self, moments):
        if not self._is_synced:
            raise ValueError(
                "compress was changed between two syncs, while the ranks' models differ: set it back, call synchronize() on all ranks, "
                "then change it"
            )
        super()._relayout(moments)

    def _shared(self, part):
        """Between syncs only the options and what `_common` names are the same on all ranks."""
        return super()._shared(part) if self._is_synced else self._common(part)

    def _common(self, part):
        return [{} for _ in part.params] if part.compress else super()._shared(part)

    def _facts(self):
        return super()._facts() | {
            "is_synced": self._is_synced,
            "moved": [i for i, p in enumerate(self._params()) if p in self._moved],
        }

    def _check_kind(self, facts):
        super()._check_kind(facts)
        if not facts.get("is_synced", True) and (facts["rank"], facts["size"]) != (
            self.communicator.rank,
            self.communicator.size,
        ):
            raise ValueError(
                f"this checkpoint was saved between two syncs, when rank {facts['rank']} of {facts['size']} had a model of its own, and "
                f"this is rank {self.communicator.rank} of {self.communicator.size}: call optimizer.synchronize() before saving, or "
                "let each rank load its own file"
            )

    def _take_facts(self, facts):
        super()._take_facts(facts)
        self._is_synced = facts.get("is_synced", True)
        params = self._params()
        self._moved = {params[i] for i in facts.get("moved", ())}
