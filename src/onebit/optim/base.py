"""What all optimizers share: flat state, agreement among the ranks, traffic, checkpoints."""

import torch

from ..comm import default_communicator
from .agreement import check_same_on_all_ranks, clip_factor, describe_parameters
from .checkpoint import check_shapes, errors_to_take, warn_of_lost_errors
from .flat import MOMENTS, FlatState
from .options import (
    ONLY_TORCH,
    check_communicator,
    check_dense,
    check_flag,
    check_group,
    check_may_step,
    check_not_moved,
    check_number,
    check_tensors,
    option_names,
    reject_misspelt,
    reject_unknown,
)
from .traffic import Communication, Traffic

MAX_CONSECUTIVE_SKIPS = 100


class DistributedOptimizer(torch.optim.Optimizer):
    """Base of the family. Gradients are each rank's own; `step` does all the averaging, on all ranks together.

    A subclass gives `_take_step() -> bool`: one step, or False if the ranks agree to skip it because a gradient is not finite.

    Args:
        params: parameters, named parameters or groups. Options of a group: lr, betas, eps, weight_decay and compress (False: its
            gradients are averaged exactly and it is trained by plain Adam); all are read at every step.
        options: defaults of the groups' options.
        max_grad_norm: clip all gradients by one factor, the same on all ranks; None: no clipping.
        check_finite: skip a step, on all ranks, if a gradient on any rank is not finite.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.
    """

    has_errors = False
    _step_supports_amp_scaling = True  # so that torch's GradScaler always calls step(), which then can say that it must not be used

    def __init__(self, params, options, *, max_grad_norm, check_finite, communicator, unknown):
        reject_unknown(unknown, option_names(type(self).__init__), type(self).__name__)
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm, 0, strict=True)
        check_flag("check_finite", check_finite)
        self._communicator_is_given = communicator is not None
        self.communicator = communicator if self._communicator_is_given else default_communicator()
        check_communicator(self.communicator)
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite
        self.last_step_skipped = False
        self._skips = 0
        self._total = self._last = Traffic()
        self._ranks_checked = False
        self._errors_are_shared = False  # whether all ranks hold the same
        self._step = torch.zeros(())
        self._parts = []
        super().__init__(params, options | {"compress": True})
        self._build({})
        self._uncompiled_step = torch.compiler.disable(self._step_with_all_ranks)  # what communicates cannot be compiled

    # ---- groups and state

    def add_param_group(self, group):
        if self._step:
            raise ValueError("a parameter group cannot be added after the first step: its variance would be younger than the others'. Give all "
                             "parameters at construction; one with requires_grad=False is left alone until you set it True, before the freeze")
        if isinstance(group, dict):
            reject_misspelt(group, type(self).__name__)
        super().add_param_group(group)
        try:
            check_group(self.param_groups[-1])
            check_tensors(self._params())
        except ValueError:
            self.param_groups.pop()
            raise
        if self._parts:
            self._build({})

    def _build(self, values):
        """Lay the parameters out and make their state, taking over `values`: for each parameter its entries."""
        flags = [group["compress"] for group in self.param_groups]
        if self.has_errors and not any(flags):
            raise ValueError(f"every parameter group has compress=False, so nothing would be compressed: use onebit.DistributedAdam, or "
                             f"{type(self).__name__} with a group to compress")
        self._compress_flags = flags
        self._compressed, self._exact = self._part(True), self._part(False)
        self._parts = [part for part in (self._compressed, self._exact) if part]
        self._allreduce = None  # the CompressedAllreduce, while there are errors to hold
        for part in self._parts:
            for p, entries in zip(part.params, part.state()):
                self.state[p] = {"step": self._step} | entries
                for name in entries.keys() & values.get(p, {}).keys():
                    entries[name].copy_(values[p][name])

    def _part(self, compress):
        groups = [group for group in self.param_groups if group["compress"] == compress and group["params"]]
        return FlatState(groups, self.communicator.size, self.has_errors and compress) if groups else None

    def _params(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self):
        """A name for each parameter, in the groups' order."""
        for i, group in enumerate(self.param_groups):
            yield from group.get("param_names") or (f"param_groups[{i}]['params'][{j}]" for j in range(len(group["params"])))

    @property
    def steps(self):
        """Steps taken, without those skipped."""
        return int(self._step)

    # ---- a step

    @torch.no_grad()
    def step(self, closure=None):
        """Average the ranks' gradients and update the parameters. Every rank must call it, even one without gradients.

        Returns what `closure` returns, if it is given. Raises RuntimeError on all ranks at the first step if their parameters
        differ, and after MAX_CONSECUTIVE_SKIPS steps skipped in a row.
        """
        return self._uncompiled_step(closure)

    def _step_with_all_ranks(self, closure):
        check_may_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group)
        self._check_ranks()
        self._check_flags()
        self._follow_phase()
        before = self._wire()
        self.last_step_skipped = not self._take_step()
        self._errors_are_shared &= self.last_step_skipped
        self._last = self._traffic_since(before)
        self._total = self._total.plus(self._last)
        self._follow_phase()
        self._count_skips()
        return loss

    def _follow_phase(self):
        """Before and after a step: bring the state into line with the phase. All ranks do it together; it is no part of the step's traffic."""

    def _take_step(self):
        raise NotImplementedError

    def __getstate__(self):
        raise TypeError("an optimizer that communicates can be neither copied nor pickled: copy or save its state_dict()")

    def _collect(self):
        """This rank's gradients, a flat vector for each part."""
        return [part.collect_gradients() for part in self._parts]

    def _factor(self, norm_squared):
        """The clipping factor for gradients of this squared norm; None: skip the step."""
        factor = clip_factor(norm_squared, self.max_grad_norm)
        return factor if factor is not None or self.check_finite else 1.0

    @property
    def _needs_norm(self):
        return self.check_finite or self.max_grad_norm is not None

    def _check_flags(self):
        """Lay the parameters out anew if a group's `compress` has changed; errors belong to a layout, so there must be none."""
        if [group["compress"] for group in self.param_groups] == self._compress_flags:
            return
        if self._allreduce:
            raise ValueError("compress was changed while compression errors are held: it may change in the warm-up of OneBitAdam only. Set it "
                             "back, call restart_warmup(steps), then change it")
        self._relayout({p: {name: entries[name] for name in MOMENTS} for p, entries in self.state.items()})

    def _relayout(self, moments):
        self._build(moments)

    def _count_skips(self):
        self._skips = self._skips + 1 if self.last_step_skipped else 0
        if self._skips >= MAX_CONSECUTIVE_SKIPS:
            raise RuntimeError(f"{self._skips} steps in a row were skipped because a gradient was not finite: lower the learning rate, the loss "
                               "scale or max_grad_norm, or freeze the variance later")

    # ---- what the ranks must have in common

    def _check_ranks(self):
        """At the first step the ranks compare their layout, options and checksums; at the others each looks at its own gradients."""
        if not self._ranks_checked:
            if not self._communicator_is_given and default_communicator().size != self.communicator.size:
                raise RuntimeError("torch.distributed was initialised after the optimizer was made, which therefore works alone: make the optimizer "
                                   "after init_process_group, or pass communicator=onebit.comm.Single() to train separate models on purpose")
            check_not_moved(self._params(), self._parts[0].gradient.device)
            self._compare_ranks()
            self._ranks_checked = True
        check_dense(self._params(), self._names())

    def _compare_ranks(self):
        """Raise RuntimeError on all ranks, naming the first difference, unless parameters, moments and options are the same on all."""
        check_same_on_all_ranks(
            self.communicator, [self._describe(), *describe_parameters(self.param_groups, self._names(), self.state)],
            self._parts[0].gradient.device,
            "Build the same model and optimizer on every rank, call onebit.broadcast_parameters(model) before the first step, and change options "
            "and load state on all ranks alike",
        )

    def _describe(self):
        return f"{type(self).__name__} after {self.steps} steps, max_grad_norm={self.max_grad_norm}, check_finite={self.check_finite}"

    # ---- traffic

    def _wire(self):
        return self.communicator.bytes_sent, self.communicator.bytes_received, self.communicator.calls

    def _traffic_since(self, before):
        ranks = self.communicator.size
        exact = sum(2 * (ranks - 1) * sum(part.layout.numels) * part.wire_dtype.itemsize // ranks for part in self._parts)
        return Traffic(*(now - then for now, then in zip(self._wire(), before)), exact)

    @property
    def communication(self):
        """A frozen snapshot of this rank's traffic in steps: bytes_sent, bytes_received, calls, compression_ratio; `.last_step` alike.

        It leaves out what passes between steps: how the ranks are compared at the first step and at the freeze, and what `restart_warmup`
        and `synchronize` send. The communicator's own counters have everything.
        """
        return Communication(**vars(self._total), last_step=self._last)

    # ---- checkpoints

    def state_dict(self):
        """As any optimizer's. Compression errors differ between ranks: let each rank save its own file, or call `synchronize` first.

        torch.distributed.checkpoint takes every tensor from some one rank: with it, always call `synchronize` first.
        """
        saved = super().state_dict()
        saved["param_groups"][0]["onebit"] = self._facts()
        return saved

    def _facts(self):
        """What a checkpoint holds beside tensors and options."""
        return {"rank": self.communicator.rank, "size": self.communicator.size, "errors_are_shared": self._errors_are_shared,
                "holds_errors": self._allreduce is not None}

    def load_state_dict(self, state_dict, reset_errors=False):
        """Take over a state, also a plain torch.optim.Adam or AdamW's. State keeps its own dtype whatever the parameters'.

        Args:
            reset_errors: start with zero errors, and warn of how much is lost, where the checkpoint's belong to another rank.

        Raises ValueError if the errors belong to another rank or world size, or if the groups do not match.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        facts = groups[0].pop("onebit", {})
        errors = errors_to_take(facts, self.communicator.rank, self.communicator.size, reset_errors)
        indices = [i for group in groups for i in group["params"]]
        saved = [{name: value for name, value in state_dict["state"].get(i, {}).items() if name in (*MOMENTS, *errors)}
                 for i in indices]
        check_shapes(self._params(), self._names(), saved)
        if not errors:
            warn_of_lost_errors(state_dict["state"])
        self._check_kind(facts)
        options = [own | {key: value for key, value in group.items() if key not in (*ONLY_TORCH, "param_names")}
                   for group, own in zip(groups, self.param_groups)]
        super().load_state_dict({"state": {}, "param_groups": options + groups[len(options) :]})
        self._step.fill_(max((float(entries["step"]) for entries in state_dict["state"].values()), default=0.0))
        self._build(dict(zip(self._params(), saved)))
        self._take_facts(facts)

    def _check_kind(self, facts):
        if facts.get("variance_is_corrected"):
            raise ValueError("this checkpoint holds a frozen variance: load it into onebit.OneBitAdam, and call restart_warmup(steps) to go on "
                             "exactly")

    def _take_facts(self, facts):
        self._errors_are_shared = facts.get("errors_are_shared", False)
        self._ranks_checked = False

    def restart_warmup(self, steps):
        """Go back to exact Adam for `steps` steps; nothing changes for an optimizer that never freezes its variance."""

    def synchronize(self):
        """Give every rank the same state, so that one checkpoint serves all ranks, and any number of them. All ranks must call it.

        Each worker error becomes mean_i delta_i + delta_bar and the server error 0, by one exact all_reduce: what the errors hold
        together does not change.
        """
        if self._allreduce:
            self._compressed.worker_error.copy_(self._allreduce.total_error())
            self._compressed.server_error.zero_()
            self._errors_are_shared = True
