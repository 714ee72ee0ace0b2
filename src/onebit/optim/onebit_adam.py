"""1-bit Adam."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.compression import Sign
from onebit.optim import notices
from onebit.optim.bounded_steps import BoundedSteps
from onebit.optim.bucket import Bucket, Group
from onebit.optim.freeze import (
    NO_GRADIENT,
    FixedSteps,
    Policy,
    large_steps,
    raise_to_floor,
    small_variance,
    why_unsettled,
)
from onebit.optim.packed_update import packed_update
from onebit.optim.run_state import Option, RunState
from onebit.optim.traffic import Traffic
from onebit.optim.validation import check_flag, check_number


@dataclass(eq=False)
class WarmupRun(RunState):
    """Attributes:
    policy: the user's; the option `warmup` is the one in force, which `restart_warmup` changes.
    variance_steps: how often the variance was updated.
    variance_is_corrected: whether it was divided by 1 - beta2^T_w, once and for all.
    restart_end: the step at which a new warm-up ends; None: there was none.
    traffic_at_freeze: that of the last step before the freeze, until the freeze is logged.
    """

    policy: Policy | None = None
    variance_steps: int = 0
    variance_is_corrected: bool = False
    restart_end: int | None = None
    traffic_at_freeze: Traffic | None = None


class OneBitAdam(BoundedSteps):
    """1-bit Adam (Tang et al., ICML 2021, Algorithm 1).

    It is Adam for T_w steps; then the momentum is sent as signs, under a frozen variance.

    Warm-up, steps 1 to T_w: `DistributedAdam`. Then v is frozen, and with this rank's gradient g_i

        m_i = beta1 m + (1 - beta1) g_i                                     line 6
        m   = C-allreduce(m_i)                                              lines 7-12
        x  <- (1 - lr weight_decay) x - lr m_hat / (sqrt(v) + eps)          line 13

    where the last fraction is brought into the bounds of Adam's own step, see `bound_steps`. For
    C-allreduce see `onebit.allreduce.CompressedAllreduce`. The worker and server errors are in
    units of the momentum. A compressed step is three collectives: 16 bytes of agreement, then one
    all_to_all and one all_gather of n / 8 bytes together with one scale per tensor.

    Coordinates whose v is exactly zero at the freeze are masked: one bit cannot say zero, and
    m / eps explodes. They keep their value (except for weight decay); a warning tells if they get a
    gradient after all.

    After the first compressed step the logger "onebit" has one line on rank 0, of level INFO, with
    the bytes sent before and after. `logging.basicConfig(level=logging.INFO)` shows it.

    Args: as `DistributedAdam`, and
        warmup: T_w, an int, `FixedSteps` or `VarianceRatio`. 15 to 25 % of all steps is a good
            start.
        bias_correction: the warm-up equals AdamW; v is divided by 1 - beta2^T_w once, at the
            freeze, and m by 1 - beta1^t at every step.
        max_grad_norm: after the freeze it bounds sqrt(mean_i ||g_i||^2), since nobody knows the
            mean gradient by then.
        check_finite: False together with max_grad_norm=None saves a pass over the
            gradients. Then neither gradients that are not finite nor gradients of masked
            coordinates are noticed.
        variance_floor: at the freeze v becomes at least this fraction of its tensor's mean, so
            that nothing is masked; 0: mask.
        bound_steps: no coordinate moves further in a compressed step than Adam could move it, see
            `onebit.optim.bounded_steps`; `bounded_share` says how many would have. False: as in the
            paper.
        compressor: see `onebit.compression`; None: `Sign`. `Identity` gives "1-bit Adam (32 bits)".
        bucket_cap_mb, overlap: as `DistributedAdam`'s. Buckets cut the vector at other places, so
            the servers' scales are those of other pieces; overlap itself changes no bit. It costs
            as much memory as the errors.
    """

    run_state = WarmupRun
    compresses = True
    takes_frozen_variance = True

    warmup: Policy = Option()
    variance_floor: float = Option()
    compressor: Any = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup: int | Policy,
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        variance_floor: float = 0.0,
        bound_steps: bool = True,
        compressor: Any = None,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        check_number("variance_floor, a fraction of a tensor's mean variance,", variance_floor, 0)
        self._run.policy = warmup if isinstance(warmup, Policy) else FixedSteps(warmup)
        self.warmup = self._run.policy
        check_flag("bound_steps", bound_steps)
        self.variance_floor = variance_floor
        self.bound_steps = bound_steps
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
        self._begin_warmup(self._run.policy)

    @property
    def masked_remedy(self) -> str:  # type: ignore[override]
        """The floor is a fraction of a tensor's mean variance, and so of no use where that is 0."""
        floor = (
            "; variance_floor cannot help a tensor that had no gradient at all"
            if self.variance_floor
            else ", or set variance_floor"
        )
        return f"Call restart_warmup(steps), put them in a group with compress=False{floor}"

    # ---- the contract of subclasses, beside that of `DistributedAdam`

    def _freeze(self) -> None:
        """Line 2: v_{T_w}. All of it is computed from state that all ranks share, and the ranks
        make sure that it is the same."""
        run = self._run
        if not all(bucket.variance.max().isfinite() for bucket in self._compressed):
            raise RuntimeError(
                "the variance has overflowed: a gradient was too large to be squared. Set "
                "max_grad_norm, or lower the learning rate"
            )
        self._compare_ranks()
        unsettled = why_unsettled(self.warmup, self.steps)
        if unsettled:
            self._warn(unsettled)
        for bucket in self._compressed:
            if self.bias_correction and not run.variance_is_corrected:
                for group, span in bucket.spans:
                    bucket.variance[span] /= 1 - group["betas"][1] ** run.variance_steps
            if self.variance_floor:
                raise_to_floor(bucket, self.variance_floor)
        run.variance_is_corrected |= self.bias_correction
        self._mask_and_compress()
        if not any(bucket.partition.mask.any() for bucket in self._compressed):
            self._warn(NO_GRADIENT)
        self._warn_of_small_variance()
        run.traffic_at_freeze = run.meter.last

    def _total_error(self, bucket: Bucket) -> torch.Tensor:
        """mean_i delta_i + delta_bar in units of the momentum, float [layout.size]."""
        return bucket.allreduce.total_error()

    # ---- a step

    @property
    def phase(self) -> str:
        """How the NEXT step communicates: "warmup" exactly, "compressed" with one bit.

        After step T_w it is therefore "compressed".
        """
        return "compressed" if self.warmup.is_over(self.steps) else "warmup"

    def _compressed_update(self, bucket: Bucket, outcome: torch.Tensor) -> None:
        """Lines 12 and 13: m is what all ranks received, and stays packed."""
        was_packed = bucket.packed is not None
        bucket.pack_momentum(outcome)
        if not was_packed:
            self._show_state(bucket)
        decays, rates, epsilons = self._update_factors(bucket)
        bounded = packed_update(
            bucket.allreduce.compressor,
            bucket.trained(),
            bucket.variance,
            outcome,
            decays,
            rates,
            epsilons,
            self._limits(bucket, rates),
        )
        self._run.bounded.append(bounded)

    def _count_step(self) -> None:
        super()._count_step()
        self._run.variance_steps += not self._is_compressing

    def _finish_step(self) -> None:
        if not self._is_compressing and self.warmup.wants(self.steps):
            self.warmup.observe(self.steps, sum(map(self._variance_sum, self._compressed)))

    def _variance_correction(self, bucket: Bucket, group: Group) -> float:
        if not bucket.compress:
            return super()._variance_correction(bucket, group)
        updates = self._run.variance_steps
        if self._run.variance_is_corrected or not updates:
            return 1.0
        return 1 - group["betas"][1] ** updates

    # ---- between the phases

    def _follow_phase(self) -> None:
        """Freeze or thaw the variance if the phase says so.

        After a load or a new warm-up the state may lag behind the phase.
        """
        self._log_first_compressed_step()
        if self.phase == "compressed" and not self._is_compressing:
            self._freeze()
        elif self.phase == "warmup" and self._is_compressing:
            self._thaw()

    def _log_first_compressed_step(self) -> None:
        run, last = self._run, self._run.meter.last
        if run.traffic_at_freeze is None or run.traffic_at_freeze is last or run.last_step_skipped:
            return
        run.traffic_at_freeze = None
        if self.communicator.rank == 0:
            notices.LOGGER.info(
                "%s: the variance is frozen and compression has begun in step %d; a rank sends "
                "%s bytes per step instead of %s",
                type(self).__name__,
                self.steps,
                f"{last.bytes_sent:,}",
                f"{last.exact_bytes:,}",
            )

    def _begin_warmup(self, policy: Policy) -> None:
        self.warmup = copy.deepcopy(policy)
        self.warmup.bind(max(group["betas"][1] for group in self.param_groups))

    def _mask_and_compress(self) -> None:
        """Where v = 0 nothing is sent. A frozen v does not change, so the mask follows from it."""
        for bucket in self._compressed:
            self._make_allreduce(bucket, bucket.layout.real & (bucket.variance > 0))

    def _thaw(self) -> None:
        """m <- m + mean_i delta_i + delta_bar, by one exact all_reduce; no error is left."""
        for bucket in self._compressed:
            bucket.momentum = bucket.momentum + self._total_error(bucket)
            bucket.drop_errors()
            self._show_state(bucket)

    def restart_warmup(self, steps: int) -> None:
        """Go back to exact Adam for `steps` steps, then freeze anew.

        This is for a change of data, such as a longer sequence. The momentum takes over what the
        errors hold, the variance goes on from its frozen value, and the next freeze makes a new
        mask. All ranks must call it, between the same two steps.

        Raises ValueError unless `steps` is a whole number of at least 1.
        """
        self._must_be_idle("restart_warmup was called")
        self._run.restart_end = self.steps + FixedSteps(steps).steps
        self._begin_warmup(FixedSteps(self._run.restart_end))
        self._follow_phase()

    def _warn_of_small_variance(self) -> None:
        """Bounded steps need no warning."""
        if self.bound_steps:
            return
        eps = max(group["eps"] for group in self.param_groups)
        names = dict(zip(self._params(), self._names()))
        warning = small_variance(
            {
                names[p]: count
                for bucket in self._compressed
                for p, count in zip(bucket.params, large_steps(bucket, eps))
            }
        )
        if warning:
            self._warn(warning)

    def _change_layout(self, moments: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """A variance that is corrected once and for all and one that is corrected at each step are
        different numbers: convert."""
        before = self._correction_of_each()
        super()._change_layout(moments)
        after = self._correction_of_each()
        for bucket in self._run.buckets if self.bias_correction else ():
            for p, v in zip(bucket.params, bucket.layout.views(bucket.variance)):
                v *= after[p] / before[p]

    def _correction_of_each(self) -> dict[torch.Tensor, float]:
        return {
            p: self._variance_correction(bucket, group)
            for bucket in self._run.buckets
            for group, p in zip(bucket.groups, bucket.params)
        }

    # ---- checkpoints

    def _facts(self) -> dict[str, Any]:
        run = self._run
        return super()._facts() | {
            "variance_steps": run.variance_steps,
            "variance_is_corrected": run.variance_is_corrected,
            "policy": repr(run.policy),
            "restart_end": run.restart_end,
            "warmup": self.warmup.state_dict(),
        }

    def _check_facts(self, facts: dict[str, Any], groups: list[Group]) -> None:
        """What a policy has seen must fit it."""
        super()._check_facts(facts, groups)
        if facts.get("policy") != repr(self._run.policy):
            return
        policy = copy.deepcopy(self._run.policy)
        policy.bind(max(group["betas"][1] for group in groups))
        seen, own = facts.get("warmup"), policy.state_dict()
        norms = seen.get("norms") if isinstance(seen, dict) else None
        same = getattr(norms, "shape", None) == own["norms"].shape
        if "restart_end" not in facts or not same:
            raise ValueError(
                "what the checkpoint says of its warm-up (restart_end, warmup) is missing or of "
                "another length than this optimizer's: save the state_dict as it is, and load it "
                "with the same warmup and betas"
            )

    def _take_facts(self, facts: dict[str, Any]) -> None:
        """A restart and what a policy chose are taken over only if the user's policy is still the
        one that they were saved under."""
        super()._take_facts(facts)
        run = self._run
        run.variance_steps = facts.get("variance_steps", self.steps)
        run.variance_is_corrected = facts.get("variance_is_corrected", False)
        same_policy = facts.get("policy") == repr(run.policy)
        run.restart_end = facts["restart_end"] if same_policy else None
        self._begin_warmup(run.policy if run.restart_end is None else FixedSteps(run.restart_end))
        if same_policy:
            self.warmup.load_state_dict(facts["warmup"])
        if facts.get("holds_errors"):
            self._mask_and_compress()
