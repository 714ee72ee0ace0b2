from onebit.compression import Sign
from onebit.kernels.torch_ops import apply_moves
from onebit.optim.adam import DistributedAdam
from onebit.optim.compressed import CompressedSteps
from onebit.optim.options import check_compressor
from onebit.optim.steps import scaled


class CompressedMomentumAdam(CompressedSteps, DistributedAdam):
    """Base of Adam whose momentum is compressed from the first step while the variance goes on:

        m = C-allreduce(beta1 m + (1 - beta1) g_i)        v_i = beta2 v + (1 - beta2) g_i^2

    A subclass says what is made of v_i: `_outgoing(part, variance)` prepares what `_exchange(part, payload, ...)` takes, which does the
    step's exchanges; and `_compressed_update(part, outcome)` takes what that returns.

    Args: as `DistributedAdam`, and
        compressor: C, see `onebit.compression`; None: `Sign`.
    """

    def __init__(self, params, lr, betas, eps, weight_decay, *, compressor, **options):
        self.compressor = check_compressor(compressor or Sign)
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def _start_exchange(self, part, factor=1.0):
        if not part.allreduce:
            return super()._start_exchange(part, factor)
        payload = part.allreduce.compress(self._terms(part, factor))
        return self._runner.submit(
            self._exchange, part, payload, *self._outgoing(part, self._local_variance(part, factor))
        )

    def _local_variance(self, part, factor):
        """v_i = beta2 v + (1 - beta2) (factor g_i)^2, a new vector."""
        variance = scaled(part.flat_gradient(), factor).square()
        for group, span in part.spans:
            variance[span].mul_(1 - group["betas"][1]).add_(part.variance[span] * group["betas"][1])
        return variance

    def _corrected(self, part, variance):
        """`variance` divided by 1 - beta2^t, or by 1, in place."""
        for group, span in part.spans:
            variance[span] /= self._corrections(part, group)[1]
        return variance

    def _move(self, part, gathered, variance):
        """m is what was gathered; x <- decay x - (lr / c1) m / (sqrt(variance) + eps)."""
        decays, steps, epsilons = self._numbers(part)
        moves = part.allreduce.decode(gathered)
        part.momentum.copy_(moves)
        for view, step in zip(part.layout.views(moves), steps):
            view *= step
        apply_moves(part.partition, part.trained(), variance, moves, decays, epsilons)
