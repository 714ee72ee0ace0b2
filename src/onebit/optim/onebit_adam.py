import copy
import warnings

import torch

from ..allreduce import CompressedAllreduce
from ..compression import Sign
from ..kernels.torch_ops import per_block, segment_sums
from ..layout import ALIGNMENT
from .adam import DistributedAdam
from .warmup import FixedSteps, Policy


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
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    has_errors = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *, warmup=None, bias_correction=True,
                 max_grad_norm=None, check_finite=True, variance_floor=0.0, compressor=None, communicator=None, **unknown):
        if warmup is None and not unknown:
            raise TypeError("OneBitAdam needs warmup=, the number of steps before the variance is frozen: 15 to 25 % of all steps is the "
                            "papers' rule of thumb, onebit.VarianceRatio(min_steps=...) chooses it")
        if not variance_floor >= 0:
            raise ValueError(f"variance_floor is a fraction of a tensor's mean variance, at least 0, not {variance_floor}")
        self.warmup = copy.deepcopy(warmup) if isinstance(warmup, Policy) else FixedSteps(1 if warmup is None else warmup)
        self.variance_floor = variance_floor
        self.compressor = compressor or Sign
        self._variance_steps = 0  # how often the variance was updated
        self._variance_is_corrected = False
        self._restart_end = None
        self._warned_of_late_gradients = False
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction, max_grad_norm=max_grad_norm,
                         check_finite=check_finite, communicator=communicator, **unknown)
        self._bind_warmup(self.warmup)

    @property
    def phase(self):
        return "compressed" if self.warmup.is_over(self.steps) else "warmup"

    def _bind_warmup(self, policy):
        policy.bind(max(group["betas"][1] for group in self.param_groups))
        self.warmup = policy

    def _describe(self):
        return f"{super()._describe()}, {self.phase}, warmup={self.warmup!r}, variance_floor={self.variance_floor}"

    def _take_step(self):
        self._follow_phase()
        taken = self._compressed_step() if self._allreduce else self._warmup_step()
        self._follow_phase()
        return taken

    def _warmup_step(self):
        taken = self._exact_step()
        if taken and self.warmup.wants(self.steps):
            self.warmup.observe(self.steps, self.variance_norms()[0])
        return taken

    def _compressed_step(self):
        gradients = self._collect()
        factor, late = self._agree(gradients, self._count_late_gradients())
        if factor is None:
            return False
        self._warn_of_late_gradients(late)
        self._step += 1
        for part, g in zip(self._parts, gradients):
            g.mul_(factor)
            if part is self._compressed:
                self._compressed_adam(part, g)
            else:
                self._adam(part, self._exact_mean(part, g))
        return True

    def _compressed_adam(self, part, g):
        for group, span in part.spans:
            beta1 = group["betas"][0]
            part.momentum[span].mul_(beta1).add_((1 - beta1) * g[span])      # line 6
        part.momentum.copy_(self._allreduce.allreduce(part.momentum))        # lines 7-12
        self._update(part)                                                   # line 13

    def _adam(self, part, g):
        self._variance_steps += part is self._compressed
        super()._adam(part, g)

    def _variance_correction(self, part, group):
        if part is not self._compressed:
            return super()._variance_correction(part, group)
        return 1.0 if self._variance_is_corrected or not self._variance_steps else 1 - group["betas"][1] ** self._variance_steps

    # ---- between the phases

    def _follow_phase(self):
        """Freeze or thaw the variance if the phase says so; after a load or a new warm-up the state may lag behind the phase."""
        if self.phase == "compressed" and not self._allreduce:
            self._freeze()
        elif self.phase == "warmup" and self._allreduce:
            self._thaw()

    def _freeze(self):
        """Line 2: v_{T_w}. Everything here is computed from state that all ranks share."""
        self._warn_if_unsettled()
        part = self._compressed
        if self.bias_correction and not self._variance_is_corrected:
            for group, span in part.spans:
                part.variance[span] /= 1 - group["betas"][1] ** self._variance_steps
            self._variance_is_corrected = True
        if self.variance_floor:
            self._raise_to_floor(part.variance, part.layout)
        self._make_allreduce()

    def _raise_to_floor(self, v, layout):
        """v <- max(v, variance_floor * mean of its tensor), in place."""
        means = segment_sums(v, layout.lengths) / segment_sums(layout.real, layout.lengths).clamp(min=1)
        floor = per_block((self.variance_floor * means).to(v.dtype), layout.lengths)
        v.copy_(torch.where(layout.real, torch.maximum(v.view(-1, ALIGNMENT), floor).flatten(), 0))

    def _make_allreduce(self):
        part = self._compressed
        active = part.layout.real & (part.variance > 0)
        self._masked = (part.layout.real & ~active).nonzero().flatten()
        self._allreduce = CompressedAllreduce(self.communicator, part.layout, part.worker_error, part.server_error, self.compressor, active)

    def _thaw(self):
        """m <- m + mean_i delta_i + delta_bar, by one exact all_reduce; no error is left."""
        part = self._compressed
        part.momentum += self._allreduce.total_error()
        part.worker_error.zero_()
        part.server_error.zero_()
        self._allreduce = None

    def restart_warmup(self, steps):
        """Go back to exact Adam for `steps` steps, then freeze anew: for a change of data, such as a longer sequence.

        The momentum takes over what the errors hold, the variance goes on from its frozen value, and the next freeze makes a new
        mask. All ranks must call it, between the same two steps.
        """
        self._restart_end = self.steps + FixedSteps(steps).steps
        self._bind_warmup(FixedSteps(self._restart_end))
        self._follow_phase()

    # ---- warnings

    def _warn_if_unsettled(self):
        policy = self.warmup
        if self._variance_steps <= policy.window:
            self._warn(f"the variance is frozen after {self._variance_steps} steps, no more than its memory 1 / (1 - beta2) = {policy.window}: it is "
                       "likely not settled, and training may be slow or unstable. A longer warmup is safer")
        elif policy.ratio is not None and not policy.is_settled():
            self._warn(f"the variance is frozen after {self.steps} steps while it still changes: ||v_t||_1 / ||v_(t-{policy.window})||_1 = "
                       f"{policy.ratio:.3f}, outside [{policy.threshold}, {1 / policy.threshold:.3f}]. A longer warmup, or "
                       "onebit.VarianceRatio, is safer")

    def _count_late_gradients(self):
        return int(torch.count_nonzero(self._compressed.gradient[self._masked])) if len(self._masked) else 0

    def _warn_of_late_gradients(self, late):
        if late and not self._warned_of_late_gradients:
            self._warned_of_late_gradients = True
            self._warn(f"{late} gradient elements, over all ranks, belong to coordinates that had none before the freeze: they are masked and do "
                       "not train. Call restart_warmup(steps), put them in a group with compress=False, or set variance_floor")

    def _warn(self, message):
        if self.communicator.rank == 0:
            warnings.warn(message, stacklevel=2)

    # ---- checkpoints

    def _facts(self):
        return super()._facts() | {"variance_steps": self._variance_steps, "variance_is_corrected": self._variance_is_corrected,
                                   "restart_end": self._restart_end, "warmup": self.warmup.state_dict()}

    def _take_facts(self, facts):
        super()._take_facts(facts)
        self._variance_steps = facts.get("variance_steps", self.steps)
        self._variance_is_corrected = facts.get("variance_is_corrected", False)
        self._restart_end = facts.get("restart_end")
        if self._restart_end is not None:
            self._bind_warmup(FixedSteps(self._restart_end))
        if "warmup" in facts:
            self.warmup.load_state_dict(facts["warmup"])
        if facts.get("has_errors"):
            self._make_allreduce()
