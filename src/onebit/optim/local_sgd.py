from onebit.allreduce import ExactAllreduce
from onebit.optim.local import LocalSteps
from onebit.optim.options import check_whole, option_names, reject_unknown
from onebit.optim.sgd import DistributedSGD


class LocalSGD(LocalSteps, DistributedSGD):
    """Local SGD: every rank trains a model of its own, and every tau steps the models and their momenta are averaged (Stich, 2019).

        m_i <- momentum m_i + (1 - dampening) (g_i + weight_decay x_i)        x_i <- x_i - lr m_i        at every step
        x_i <- mean_j x_j                m_i <- mean_j m_j                                               after steps tau, 2 tau, ...

    "Local SGD" and "Local SGD with Momentum" of "1-bit Adam", Figures 10 and 11. Nothing is sent but in the steps that average: there two
    all_reduces, of x and of m, in the vectors' type, which is float32 or float64 whatever the parameters'; that of m is left out, and m
    set to 0, if the momentum is 0. Skipped steps do not count.

    Between two averages gradients are clipped by each rank's own norm and one that is not finite counts as zero; in a step that averages
    the ranks agree on both first. `synchronize()` averages now: before evaluation, or so that one checkpoint serves all ranks.

    Args: as `DistributedSGD`, and
        tau: steps from one average to the next, at least 1; math.inf: average only on `synchronize()`.
        max_grad_norm: between averages it bounds the norm of each rank's own gradient, in a step that averages sqrt(mean_i ||g_i||^2).

    A group with compress=False is trained by `DistributedSGD` at every step.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        *,
        tau=4,
        max_grad_norm=None,
        check_finite=True,
        communicator=None,
        **unknown,
    ):
        reject_unknown(unknown, option_names(LocalSGD.__init__), type(self).__name__)
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

    def _describe(self):
        return f"{super()._describe()}, tau={self.tau}"

    def _meets_next(self):
        return (self.steps + 1) % self.tau == 0

    def _local_update(self, part, factor):
        self._exact_update(part, self._own_gradient(part, factor))

    def _finish_step(self):
        self._is_synced = not self._compressed
        if self.steps % self.tau == 0:
            self._sync()

    def _sync(self):
        """x_i <- mean_j x_j and m_i <- mean_j m_j."""
        for part in self._compressed:
            self._take_parameters(part, self._mean(part.flat(part.params)))
            if any(group["momentum"] for group, _ in part.spans):
                self._mean(part.momentum)
            else:
                part.momentum.zero_()
        self._moved.clear()
        self._is_synced = True

    def _mean(self, vector):
        """The mean over the ranks, in its place."""
        return self._runner.submit(ExactAllreduce(self.communicator).allreduce, vector).result()
