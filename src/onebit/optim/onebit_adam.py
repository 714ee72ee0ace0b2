import copy

import torch

from onebit.compression import Sign
from onebit.optim.adam import DistributedAdam
from onebit.optim.options import (
    check_compressor,
    check_number,
    describe_compressor,
    option_names,
    reject_unknown,
)
from onebit.optim.packed_update import packed_update
from onebit.optim.small_variance import large_steps, raise_to_floor, small_variance
from onebit.optim.warmup import FixedSteps, Policy


class OneBitAdam(DistributedAdam):
    """1-bit Adam (Tang et al., ICML 2021, Algorithm 1): Adam for T_w steps, then momentum sent as signs under a frozen variance.

    Warm-up, steps 1 to T_w: `DistributedAdam`. Then v is frozen, and with this rank's gradient g_i

        m_i = beta1 m + (1 - beta1) g_i                                   line 6
        m   = C-allreduce(m_i)                                            lines 7-12, see `onebit.allreduce.CompressedAllreduce`
        x  <- (1 - lr weight_decay) x - lr m_hat / (sqrt(v) + eps)        line 13

    The worker and server errors are in units of the momentum. A compressed step is three collectives: 16 bytes of agreement, then
    one all_to_all and one all_gather of n / 8 bytes together with one scale per tensor.

    Coordinates whose v is exactly zero at the freeze are masked: one bit cannot say zero, and m / eps explodes. They keep their value
    (but for weight decay); a warning tells if they get a gradient after all.

    Args: as `DistributedAdam`, and
        warmup: T_w, an int, `FixedSteps` or `VarianceRatio`. Required: 15 to 25 % of all steps is a good start.
        bias_correction: the warm-up equals AdamW; v is divided by 1 - beta2^T_w once, at the freeze, and m by 1 - beta1^t at every step.
        max_grad_norm: after the freeze it bounds sqrt(mean_i ||g_i||^2), since the mean gradient is not known by then.
        check_finite: False together with max_grad_norm=None saves a pass over the gradients and the 16 bytes; then neither gradients
            that are not finite nor late gradients of masked coordinates are noticed.
        variance_floor: at the freeze v becomes at least this fraction of its tensor's mean, so that nothing is masked; 0: mask.
        compressor: see `onebit.compression`; None: `Sign`. `Identity` gives "1-bit Adam (32 bits)".
        bucket_cap_mb, overlap: as `DistributedAdam`'s. Buckets cut the vector at other places, so the servers' scales are those of other
            pieces; overlap itself changes no bit. It costs as much memory as the errors.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    has_errors = True
    takes_frozen_variance = True
    late_remedy = (
        "Call restart_warmup(steps), put them in a group with compress=False, or set variance_floor"
    )

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        warmup=None,
        bias_correction=True,
        max_grad_norm=None,
        check_finite=True,
        variance_floor=0.0,
        compressor=None,
        bucket_cap_mb=None,
        overlap=False,
        communicator=None,
        **unknown,
    ):
        reject_unknown(unknown, option_names(OneBitAdam.__init__), type(self).__name__)
        if warmup is None:
            raise TypeError(
                f"{type(self).__name__} needs warmup=, the number of steps before the variance is frozen: 15 to 25 % of all steps is "
                "the papers' rule of thumb, onebit.VarianceRatio(min_steps=...) chooses it"
            )
        check_number("variance_floor, a fraction of a tensor's mean variance,", variance_floor, 0)
        self._policy = (
            warmup if isinstance(warmup, Policy) else FixedSteps(warmup)
        )  # the user's; `self.warmup` is the one in force
        self.variance_floor = variance_floor
        self.compressor = check_compressor(compressor or Sign)
        self._variance_steps = 0  # how often the variance was updated
        self._variance_is_corrected = False
        self._restart_end = None
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
        self._begin_warmup(self._policy)

    @property
    def phase(self):
        return "compressed" if self.warmup.is_over(self.steps) else "warmup"

    def _begin_warmup(self, policy):
        self.warmup = copy.deepcopy(policy)
        self.warmup.bind(max(group["betas"][1] for group in self.param_groups))

    def _describe(self):
        return (
            f"{super()._describe()}, {self.phase}, warmup={self.warmup!r}, variance_floor={self.variance_floor}, "
            f"compressor={describe_compressor(self.compressor)}"
        )

    def _take_step(self):
        return self._compressed_step() if self._holds_errors else self._warmup_step()

    def _warmup_step(self):
        taken = self._exact_step()
        if taken and self.warmup.wants(self.steps):
            self.warmup.observe(self.steps, sum(map(self._variance_sum, self._compressed)))
        return taken

    def _compressed_update(self, part, gathered):
        """Lines 12 and 13: m is what all ranks received, and stays packed."""
        was_packed = part.packed is not None
        part.pack_momentum(gathered)
        if not was_packed:
            self._show_state(part)
        packed_update(
            part.allreduce.compressor,
            part.trained(),
            part.variance,
            gathered,
            *self._numbers(part),
        )

    def _count_step(self):
        super()._count_step()
        self._variance_steps += not self._holds_errors

    def _variance_correction(self, part, group):
        if not part.compress:
            return super()._variance_correction(part, group)
        return (
            1.0
            if self._variance_is_corrected or not self._variance_steps
            else 1 - group["betas"][1] ** self._variance_steps
        )

    # ---- between the phases

    def _follow_phase(self):
        """Freeze or thaw the variance if the phase says so; after a load or a new warm-up the state may lag behind the phase."""
        if self.phase == "compressed" and not self._holds_errors:
            self._freeze()
        elif self.phase == "warmup" and self._holds_errors:
            self._thaw()

    def _freeze(self):
        """Line 2: v_{T_w}. Everything here is computed from state that all ranks share, and the ranks make sure that it is the same."""
        if not all(torch.isfinite(part.variance).all() for part in self._compressed):
            raise RuntimeError(
                "the variance has overflowed: a gradient was too large to be squared. Set max_grad_norm, or lower the learning rate"
            )
        self._compare_ranks()
        self._warn_if_unsettled()
        for part in self._compressed:
            if self.bias_correction and not self._variance_is_corrected:
                for group, span in part.spans:
                    part.variance[span] /= 1 - group["betas"][1] ** self._variance_steps
            if self.variance_floor:
                raise_to_floor(part, self.variance_floor)
        self._variance_is_corrected |= self.bias_correction
        self._mask_and_compress()
        self._warn_of_small_variance()

    def _mask_and_compress(self):
        """Where v = 0 nothing is sent: v does not change while it is frozen, so the mask follows from it."""
        for part in self._compressed:
            self._make_allreduce(part, part.layout.real & (part.variance > 0))

    def _thaw(self):
        """m <- m + mean_i delta_i + delta_bar, by one exact all_reduce; no error is left."""
        for part in self._compressed:
            part.momentum = part.momentum + self._total_error(part)
            part.drop_errors()
            self._show_state(part)

    def _total_error(self, part):
        """mean_i delta_i + delta_bar in units of the momentum."""
        return part.allreduce.total_error()

    def restart_warmup(self, steps):
        """Go back to exact Adam for `steps` steps, then freeze anew: for a change of data, such as a longer sequence.

        The momentum takes over what the errors hold, the variance goes on from its frozen value, and the next freeze makes a new
        mask. All ranks must call it, between the same two steps.
        """
        self._must_be_idle("restart_warmup was called")
        self._restart_end = self.steps + FixedSteps(steps).steps
        self._begin_warmup(FixedSteps(self._restart_end))
        self._follow_phase()

    # ---- warnings

    def _warn_if_unsettled(self):
        policy = self.warmup
        if policy.ratio is None:
            self._warn(
                f"the variance is frozen after {self.steps} steps and is not known to have settled: the warm-up was no longer than the "
                f"variance's memory, 1 / (1 - beta2) = {policy.window} steps. Training may be slow or unstable; a longer warmup is safer"
            )
        elif not policy.is_settled():
            self._warn(
                f"the variance is frozen after {self.steps} steps while it still changes: ||v_t||_1 / ||v_(t-{policy.window})||_1 = "
                f"{policy.ratio:.3f}, outside [{policy.threshold}, {1 / policy.threshold:.3f}]. A longer warmup, or "
                "onebit.VarianceRatio, is safer"
            )

    def _warn_of_small_variance(self):
        large = sum(
            large_steps(part, max(group["eps"] for group in self.param_groups))
            for part in self._compressed
        )
        if large:
            self._warn(small_variance(large))

    # ---- checkpoints

    def _relayout(self, moments):
        """A variance that is corrected once and for all and one that is corrected at each step are different numbers: convert."""
        factors = {
            p: self._variance_correction(part, group)
            for part in self._parts
            for group, p in zip(part.groups, part.params)
        }
        super()._relayout(moments)
        for part in self._parts if self.bias_correction else ():
            for group, p, v in zip(part.groups, part.params, part.layout.views(part.variance)):
                v *= self._variance_correction(part, group) / factors[p]

    def _facts(self):
        return super()._facts() | {
            "variance_steps": self._variance_steps,
            "variance_is_corrected": self._variance_is_corrected,
            "policy": repr(self._policy),
            "restart_end": self._restart_end,
            "warmup": self.warmup.state_dict(),
        }

    def _take_facts(self, facts):
        """A restart and what a policy chose are taken over only if the user's policy is still the one that they were saved under."""
        super()._take_facts(facts)
        self._variance_steps = facts.get("variance_steps", self.steps)
        self._variance_is_corrected = facts.get("variance_is_corrected", False)
        same_policy = facts.get("policy") == repr(self._policy)
        self._restart_end = facts["restart_end"] if same_policy else None
        self._begin_warmup(
            self._policy if self._restart_end is None else FixedSteps(self._restart_end)
        )
        if same_policy:
            self.warmup.load_state_dict(facts["warmup"])
        if facts.get("holds_errors"):
            self._mask_and_compress()
