"""What all optimizers share in a step: exchanges, agreement among the ranks, traffic."""

import math
from contextlib import nullcontext

import torch

from onebit.comm import default_communicator
from onebit.comm.background import Background, Inline
from onebit.optim.agreement import check_same_on_all_ranks, clip_factor, describe_parameters
from onebit.optim.options import (
    check_communicator,
    check_dense,
    check_flag,
    check_group,
    check_may_step,
    check_not_moved,
    check_number,
    option_names,
    reject_unknown,
)
from onebit.optim.overlap import STUCK, Overlap
from onebit.optim.state import FlatOptimizer
from onebit.optim.traffic import Communication, Meter

MAX_CONSECUTIVE_SKIPS = 100
DEFAULT_BUCKET_CAP = 25 * 2**20  # bytes; as DistributedDataParallel's


class DistributedOptimizer(FlatOptimizer):
    """Base of the family. Gradients are each rank's own; `step` does all the averaging, on all ranks together.

    A subclass gives `_take_step() -> bool`: one step, or False if the ranks agree to skip it because a gradient is not finite.

    Args:
        params: parameters, named parameters or groups. Options of a group: those of `options` and compress (False: its gradients are
            averaged exactly, and it is trained by the uncompressed baseline); all are read at every step.
        options: defaults of the groups' options.
        max_grad_norm: clip all gradients by one factor, the same on all ranks; None: no clipping.
        check_finite: skip a step, on all ranks, if a gradient on any rank is not finite.
        bucket_cap_mb: gradients travel in buckets of at most so many MB; None: all at once, or 25 with overlap.
        overlap: whether a bucket leaves during backward, see `Overlap`; the communicator is then duplicated.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    _step_supports_amp_scaling = (
        True  # so that torch's GradScaler calls step() even on a rank that found an inf
    )

    def __init__(
        self,
        params,
        options,
        *,
        max_grad_norm,
        check_finite,
        bucket_cap_mb,
        overlap,
        communicator,
        unknown,
    ):
        reject_unknown(unknown, option_names(type(self).__init__), type(self).__name__)
        check_flag("check_finite", check_finite)
        check_flag("overlap", overlap)
        for name, value in (("max_grad_norm", max_grad_norm), ("bucket_cap_mb", bucket_cap_mb)):
            if value is not None:
                check_number(name, value, 0, strict=True)
        if overlap and max_grad_norm is not None:
            raise ValueError(
                "max_grad_norm cannot be had with overlap=True: a bucket leaves before the norm of all gradients is known. Set "
                "max_grad_norm=None, or overlap=False"
            )
        self._communicator_is_given = communicator is not None
        communicator = communicator if self._communicator_is_given else default_communicator()
        check_communicator(communicator)
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite
        self.overlap = overlap
        self.last_step_skipped = False
        self._skips = 0
        self._ranks_checked = False
        self._hooks = None  # the `Overlap`, if there is one
        if overlap:  # the user's collectives must not come between those of the background
            communicator = communicator.duplicate()
        self._meter = Meter(communicator)
        cap = bucket_cap_mb * 2**20 if bucket_cap_mb else DEFAULT_BUCKET_CAP if overlap else None
        super().__init__(params, options, communicator, cap)
        self._uncompiled_step = torch.compiler.disable(
            type(self)._step_with_all_ranks
        )  # what communicates cannot be compiled

    def _build(self, moments):
        super()._build(moments)
        self._runner = (
            Background(self._parts[0].device) if self.overlap or len(self._parts) > 1 else Inline()
        )
        if self._hooks:
            self._hooks.remove()
        self._hooks = Overlap(self) if self.overlap else None

    # ---- a step

    @torch.no_grad()
    def step(self, closure=None):
        """Average the ranks' gradients and update the parameters. Every rank must call it, even one without gradients.

        Called by torch.amp.GradScaler.step, it divides this rank's gradients by this rank's scale, and skips on all ranks if the scaler of
        any has found an inf. The ranks' scales need not be equal. Needs overlap=False.

        Returns what `closure` returns, if it is given. Raises RuntimeError on all ranks at the first step if their parameters
        differ, and after MAX_CONSECUTIVE_SKIPS steps skipped in a row.
        """
        return self._uncompiled_step(self, closure)

    def _step_with_all_ranks(self, closure):
        check_may_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group, self._group_options)
        self._check_ranks()
        self._check_flags()
        self._follow_phase()
        self._meter.open()
        self.last_step_skipped = not self._take_step()
        self._errors_are_shared &= self.last_step_skipped
        self._meter.close(self._exact_bytes())
        self._follow_phase()
        self._count_skips()
        return loss

    def _follow_phase(self):
        """Before and after a step: bring the state into line with the phase. All ranks do it together; it is no part of the step's traffic."""

    def _take_step(self):
        raise NotImplementedError

    def _count_step(self):
        self._step += 1

    # ---- exchanges, one for each part

    def _start_exchange(self, part, factor=1.0):
        """Start to average a part's gradients, times `factor`; returns a future."""
        raise NotImplementedError

    def _exchanges(self, factor=1.0):
        """A future for each part's average; with overlap most of them have begun during backward."""
        return (
            self._hooks.exchanges()
            if self._hooks
            else [self._start_exchange(part, factor) for part in self._parts]
        )

    def _may_start_early(self):
        """Whether an exchange may begin before step() has looked at everything: not before the ranks have been compared."""
        return (
            self._ranks_checked
            and [group["compress"] for group in self.param_groups] == self._compress_flags
        )

    def _start_early(self, part):
        """Start to average a part's gradients before step(): (future, what `_measure` finds)."""
        self._meter.open()
        with torch.no_grad():
            return self._start_exchange(part), self._measure(
                part
            ) if self._holds_errors and self._needs_norm else None

    def no_sync(self):
        """A context in which backward only accumulates gradients. Needed with overlap=True, for all but the last backward before a step."""
        return self._hooks.paused() if self._hooks else nullcontext()

    def _must_be_idle(self, what):
        if self._hooks and self._hooks.is_under_way:
            raise RuntimeError(
                f"{what} between backward and step(), while gradients are being averaged: do it after step(). {STUCK}"
            )

    def _measure(self, part, gradients=None):
        """Of a part's gradients: (squared norm, elements that are not zero where masked), float64 [2]."""
        return part.kernels.measure(
            part.partition, part.gradients() if gradients is None else gradients
        )

    def _factor(self, norm_squared, unscaling=1.0):
        """The clipping factor for gradients of this squared norm, times `unscaling`; None: skip the step."""
        factor = clip_factor(norm_squared, self.max_grad_norm)
        if factor is None and (self.check_finite or self._is_scaled):
            return None
        return unscaling * (1.0 if factor is None else factor)

    @property
    def _needs_norm(self):
        return self.check_finite or self.max_grad_norm is not None or self._is_scaled

    @property
    def _is_scaled(self):
        """Whether a GradScaler calls step(): it sets `found_inf`, and `grad_scale`, which is None after `unscale_`."""
        return hasattr(self, "found_inf")

    def _unscaling(self):
        """What this rank's gradients must be multiplied by before all else: 1 / scale of a GradScaler, 1 without one.

        NaN if the scaler has found an inf, so that whatever the ranks compute together tells all of them to skip.
        """
        if not self._is_scaled:
            return 1.0
        return (
            math.nan
            if float(self.found_inf)
            else 1.0
            if self.grad_scale is None
            else 1 / float(self.grad_scale)
        )

    def _wire_dtype(self, part):
        """What a part's gradients travel in when they are averaged exactly. float16 cannot hold what a GradScaler's scale was for."""
        return (
            part.dtype if self._is_scaled and part.wire_dtype == torch.float16 else part.wire_dtype
        )

    def _count_skips(self):
        self._skips = self._skips + 1 if self.last_step_skipped else 0
        if self._skips >= MAX_CONSECUTIVE_SKIPS:
            raise RuntimeError(
                f"{self._skips} steps in a row were skipped because a gradient was not finite: lower the learning rate, the loss "
                "scale or max_grad_norm, or freeze the variance later"
            )

    # ---- what the ranks must have in common

    def _take_facts(self, facts):
        super()._take_facts(facts)
        self._ranks_checked = False

    def _check_ranks(self):
        """At the first step the ranks compare their layout, options and checksums; at the others each looks at its own gradients."""
        if not self._ranks_checked:
            if (
                not self._communicator_is_given
                and default_communicator().size != self.communicator.size
            ):
                raise RuntimeError(
                    "torch.distributed was initialised after the optimizer was made, which therefore works alone: make the optimizer "
                    "after init_process_group, or pass communicator=onebit.comm.Single() to train separate models on purpose"
                )
            for part in self._parts:
                check_not_moved(part.params, part.device, part.dtypes)
            self._compare_ranks()
            self._ranks_checked = True
        check_dense(self._params(), self._names())

    def _compare_ranks(self):
        """Raise RuntimeError on all ranks, naming the first difference, unless parameters, moments and options are the same on all."""
        shared = {
            p: tensors
            for part in self._parts
            for p, tensors in zip(part.params, self._shared(part))
        }
        check_same_on_all_ranks(
            self.communicator,
            [
                self._describe(),
                *describe_parameters(self.param_groups, self._group_options, self._names(), shared),
            ],
            self._parts[0].device,
            "Build the same model and optimizer on every rank, call onebit.broadcast_parameters(model) before the first step, and change options "
            "and load state on all ranks alike",
        )

    def _shared(self, part):
        """For each parameter of a part, what must be the same on all ranks."""
        return [
            {"parameter": p} | entries
            for p, entries in zip(part.params, part.everything(errors=False))
        ]

    def _describe(self):
        return (
            f"{type(self).__name__} after {self.steps} steps, max_grad_norm={self.max_grad_norm}, check_finite={self.check_finite}, "
            f"overlap={self.overlap}, bucket_cap={self._bucket_cap}, {'with' if self._is_scaled else 'without'} a GradScaler"
        )

    # ---- traffic

    def _exact_bytes(self):
        """What a rank would send in one exact all_reduce of all gradients in their own dtype."""
        ranks = self.communicator.size
        return sum(
            2 * (ranks - 1) * sum(part.layout.numels) * part.wire_dtype.itemsize // ranks
            for part in self._parts
        )

    @property
    def communication(self):
        """A frozen snapshot of this rank's traffic in steps: bytes_sent, bytes_received, calls, compression_ratio; `.last_step` alike.

        It leaves out what passes between steps: how the ranks are compared at the first step and at the freeze, and what `restart_warmup`
        and `synchronize` send. The communicator's own counters have everything.
        """
        return Communication(**vars(self._meter.total), last_step=self._meter.last)
