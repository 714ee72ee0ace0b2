import torch

from onebit.allreduce import ExactAllreduce
from onebit.optim.compressed_momentum import CompressedMomentumAdam
from onebit.optim.local import LocalSteps
from onebit.optim.options import check_choice, check_whole, option_names, reject_unknown


class LazyVarianceAdam(LocalSteps, CompressedMomentumAdam):
    """Adam with lazily updated variance: a baseline that falls behind ("1-bit Adam", Figure 13).

        m   = C-allreduce(beta1 m + (1 - beta1) g_i)          1 bit, with worker and server error
        v_i <- beta2 v_i + (1 - beta2) g_i^2                  every tau steps then v_i <- mean_i v_i, exactly
        x_i <- (1 - lr weight_decay) x_i - lr m_hat / (sqrt(v_hat_i) + eps)

    with m_hat and v_hat as in `DistributedAdam`. Which variance a worker divides by is not in the paper:

        steps_with="own"      its own v_i. The parameters x_i differ between averages; they are averaged when v_i is, before the step
        steps_with="average"  the last average, v_hat as of then; until there is one, that of the first step. The parameters never differ

    Where the divisor is 0 x only decays, since 1 bit cannot say zero. Averages are due at the steps tau, 2 tau, ... Between them the ranks'
    state differs: call `synchronize()` on all ranks before evaluation, and before saving one checkpoint for all. A step is three
    collectives, as `OneBitAdam`'s; one with an average has an exact all_reduce of v_i more, and of x_i with steps_with="own".

    Args: as `DistributedAdam`, and
        tau: steps from average to average, at least 1.
        steps_with: "own" or "average".
        compressor: C, of the momentum; see `onebit.compression`. None: `Sign`; `Identity` sends it as it is.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        tau=3,
        steps_with="own",
        bias_correction=True,
        max_grad_norm=None,
        check_finite=True,
        compressor=None,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        reject_unknown(unknown, option_names(type(self).__init__), type(self).__name__)
        check_whole("tau, the number of steps from average to average,", tau, 1)
        check_choice("steps_with", steps_with, ("own", "average"))
        self.tau, self.steps_with = tau, steps_with
        if steps_with == "average":
            self.more_vectors = {"average": "average_exp_avg_sq"}  # the last average, corrected
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            compressor=compressor,
            bucket_cap_mb=bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        )

    def _describe(self):
        return f"{super()._describe()}, tau={self.tau}, steps_with={self.steps_with}, averaged={self._is_synced}"

    # ---- a step

    def _take_step(self):
        """The ranks meet in every step, so it is not `LocalSteps` that takes it; what that says of the time between syncs holds here, too."""
        taken = super(LocalSteps, self)._take_step()
        if taken:
            self._is_synced = self._is_due(self.steps)
            self._moved.clear() if self._is_synced else self._note_moved()
        return taken

    def _is_due(self, step):
        return step % self.tau == 0

    def _outgoing(self, part, variance):
        """v_i, what is to be averaged of it and of x_i, if an average is due at this step."""
        due = self._is_due(self.steps + 1)
        if self.steps_with == "average":
            return variance, variance.clone() if due or not part.average.any() else None, None
        return variance, variance.clone() if due else None, part.flat(part.params) if due else None

    def _exchange(self, part, payload, variance, average, parameters):
        gathered = part.allreduce.exchange(payload)
        exact = ExactAllreduce(self.communicator)
        average, parameters = (
            None if x is None else exact.allreduce(x) for x in (average, parameters)
        )
        return gathered, variance, average, parameters

    def _compressed_update(self, part, outcome):
        gathered, variance, average, parameters = outcome
        part.variance.copy_(
            average if average is not None and self._is_due(self.steps) else variance
        )
        if parameters is not None:
            self._take_parameters(part, parameters)
        if self.steps_with == "own":
            divisor = self._corrected(part, part.variance.clone())
        else:
            if average is not None:
                part.average.copy_(self._corrected(part, average))
            divisor = part.average
        self._move(part, gathered, torch.where(divisor > 0, divisor, torch.inf))

    # ---- between averages

    def _common(self, part):
        """Between averages the variance is each rank's own, and with steps_with="own" the parameters are."""
        own = (
            ()
            if not part.compress
            else ("exp_avg_sq", "parameter")
            if self.steps_with == "own"
            else ("exp_avg_sq",)
        )
        return [
            {name: value for name, value in entries.items() if name not in own}
            for entries in super(LocalSteps, self)._shared(part)
        ]

    def _sync(self):
        """An average out of turn; the last average that steps_with="average" divides by stays the last one that was due."""
        self._must_be_idle("synchronize was called")
        exact = ExactAllreduce(self.communicator)
        for part in self._compressed:
            exact.allreduce(part.variance)
            if self.steps_with == "own":
                self._take_parameters(part, exact.allreduce(part.flat(part.params)))
        self._moved.clear()
        self._is_synced = True
