import warnings

import torch

from onebit.allreduce import CompressedAllreduce, ExactAllreduce
from onebit.optim.agreement import agree, describe_options
from onebit.optim.base import DistributedOptimizer


def scaled(g, factor):
    """factor g, in place."""
    return g if factor == 1.0 else g.mul_(factor)


class SteppingOptimizer(DistributedOptimizer):
    """The kinds of step of which the family is made: exact, compressed, and local ones that send nothing.

    A subclass gives `_exact_update(part, g)`, what a part's mean gradient does to it; and if it compresses, also `_terms(part, factor)`,
    what is sent of it, and `_compressed_update(part, gathered)`, what the received payload does to it.
    """

    late_remedy = ""  # what helps coordinates that are masked and get a gradient
    _warned_of_late_gradients = _warned_of_equal_gradients = False

    @property
    def phase(self):
        """ "warmup" or "compressed": how the next step communicates."""
        return "compressed" if self.has_errors else "warmup"

    def _take_step(self):
        return self._compressed_step() if self.has_errors else self._exact_step()

    def _exact_step(self):
        """One step on the exact mean gradient. All ranks see the same bits, so that they clip and skip alike without asking."""
        means = [exchange.result() for exchange in self._exchanges(self._unscaling())]
        factor = (
            self._factor(sum(self._squared_norm(part, g) for part, g in zip(self._parts, means)))
            if self._needs_norm
            else 1.0
        )
        if factor is None:
            for part in self._parts:
                part.drop_gradient()
            return False
        self._count_step()
        for part, g in zip(self._parts, means):
            self._exact_update(part, scaled(g, factor))
        return True

    def _compressed_step(self):
        """One step in which the gradients of compressed groups are not averaged exactly; the ranks agree before anything is changed.

        With overlap the exchanges have begun by then, out of place; without, they begin once the factor is known.
        """
        exchanges = self._exchanges() if self.overlap else None
        factor, late = self._agree()
        if factor is None:
            return False
        if late:
            self._warn_of_late_gradients(late)
        exchanges = exchanges or self._exchanges(factor)
        self._count_step()
        for part, exchange in zip(self._parts, exchanges):
            if part.allreduce:
                outcome = exchange.result()
                part.allreduce.commit()
                self._compressed_update(part, outcome)
            else:
                self._exact_update(part, exchange.result())
        return True

    def _start_exchange(self, part, factor=1.0):
        """Start to average a part's gradients, times `factor`: exactly, or compressed if it holds errors. Returns a future.

        With errors it is called before the step is counted, with overlap and without.
        """
        if part.allreduce:
            return self._runner.submit(
                part.allreduce.exchange, part.allreduce.compress(self._terms(part, factor))
            )
        return self._runner.submit(
            ExactAllreduce(self.communicator, self._wire_dtype(part)).allreduce,
            scaled(part.flat_gradient(), factor),
        )

    def _make_allreduce(self, part, active=None):
        part.hold_errors(
            CompressedAllreduce(
                self.communicator,
                part.layout,
                part.dtype,
                self.compressor,
                active,
                in_place=not self.overlap,
                rounds=self.steps,
                stream=self._parts.index(part),
            )
        )

    def _agree(self):
        """Before anything is changed: this rank's factor for its gradients, and how many of all ranks' belong to masked coordinates.

        The factor is the ranks' common clipping factor, that of sqrt(mean_i ||g_i||^2), an upper bound of the norm of the mean gradient,
        times what undoes this rank's scale; None: skip the step. Raises RuntimeError on all ranks if their options have come to differ.
        """
        if not self._needs_norm:
            return 1.0, 0
        measured = (
            self._hooks.measured() if self._hooks else [self._measure(part) for part in self._parts]
        )
        squared_norm, late = torch.stack(measured).sum(0).tolist()
        unscaling = self._unscaling()
        trained = "".join(str(int(p.requires_grad)) for p in self._params())
        options = f"{self.steps}, {trained}, {[describe_options(group, self._group_options) for group in self.param_groups]}"
        agreement = self._runner.submit(
            agree,
            self.communicator,
            unscaling**2 * squared_norm,
            int(late),
            options,
            self._parts[0].device,
        ).result()
        if not agreement.same_options:
            self._compare_ranks()
        if agreement.same_norm:
            self._warn_of_equal_gradients()
        return self._factor(agreement.squared_norm, unscaling), agreement.late

    def _warn_of_late_gradients(self, late):
        if not self._warned_of_late_gradients:
            self._warned_of_late_gradients = True
            self._warn(
                f"{late} gradient elements, over all ranks, belong to coordinates that had none before the freeze: they are masked and do "
                f"not train. {self.late_remedy}"
            )

    def _warn_of_equal_gradients(self):
        if not self._warned_of_equal_gradients:
            self._warned_of_equal_gradients = True
            self._warn(
                "all ranks' gradients have exactly the same norm. If DistributedDataParallel has averaged them already, they are sent twice: "
                "call onebit.ddp.attach(ddp_model, optimizer) before training. Otherwise give each rank its own data"
            )

    def _warn(self, message):
        if self.communicator.rank == 0:
            warnings.warn(message, stacklevel=2)

    def _squared_norm(self, part, g):
        return float(self._measure(part, part.layout.views(g))[0])
