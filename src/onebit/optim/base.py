"""What all optimizers share: flat state, agreement among the ranks, traffic, checkpoints."""

import warnings

import torch

from ..comm import default_communicator
from .agreement import check_same_on_all_ranks, checksum, clip_factor
from .flat import FlatState
from .options import check_dense, check_group, check_max_grad_norm, check_tensors, option_names, reject_unknown
from .traffic import Communication, Traffic

MAX_CONSECUTIVE_SKIPS = 100
_FOREIGN_ERRORS = (
    "this checkpoint holds the compression errors of rank {rank} of {size}, and this is rank {own_rank} of {own_size}. Either let each rank "
    "save and load its own file; or call optimizer.synchronize() before saving, then one file serves every rank and any number of "
    "ranks; or load_state_dict(..., reset_errors=True) to go on without what the errors hold"
)


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

    def __init__(self, params, options, *, max_grad_norm, check_finite, communicator, unknown):
        reject_unknown(unknown, option_names(type(self).__init__), type(self).__name__)
        check_max_grad_norm(max_grad_norm)
        self.communicator = default_communicator() if communicator is None else communicator
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite
        self.last_step_skipped = False
        self._skips = 0
        self._total = self._last = Traffic()
        self._ranks_checked = False
        self._errors_are_shared = False
        self._step = torch.zeros(())
        self._parts = []
        super().__init__(params, options | {"compress": True})
        self._build({})

    # ---- groups and state

    def add_param_group(self, group):
        if self._step:
            raise ValueError("a parameter group cannot be added after the first step: its variance would be younger than the others'. "
                             "Give all parameters at construction; one with requires_grad=False is left alone until you set it True")
        if isinstance(group, dict):
            reject_unknown(group.keys() - {"params", "param_names"}, list(self.defaults), f"a parameter group of {type(self).__name__}")
        super().add_param_group(group)
        check_group(self.param_groups[-1])
        check_tensors([p for g in self.param_groups for p in g["params"]])
        if self._parts:
            self._build(self.state)

    def _build(self, values):
        """Lay the parameters out and make their state, taking over `values`: for each parameter its entries."""
        self._compress_flags = [group["compress"] for group in self.param_groups]
        self._compressed, self._exact = self._part(True), self._part(False)
        self._parts = [part for part in (self._compressed, self._exact) if part]
        if self.has_errors and not self._compressed:
            raise ValueError(f"every parameter group has compress=False, so nothing would be compressed: use onebit.DistributedAdam, or "
                             f"{type(self).__name__} with a group to compress")
        values = {p: dict(values[p]) for p in values}
        for part in self._parts:
            for p, entries in zip(part.params, part.state()):
                self.state[p] = {"step": self._step} | entries
                for name in entries.keys() & values.get(p, {}).keys():
                    entries[name].copy_(values[p][name])

    def _part(self, compress):
        groups = [group for group in self.param_groups if group["compress"] == compress and group["params"]]
        return FlatState(groups, self.communicator.size, self.has_errors and compress) if groups else None

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = self._wire()
        self._check_ranks()
        self._check_flags()
        self.last_step_skipped = not self._take_step()
        self._last = self._traffic_since(before)
        self._total = self._total.plus(self._last)
        self._count_skips()
        return loss

    def _take_step(self):
        raise NotImplementedError

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
        if [group["compress"] for group in self.param_groups] != self._compress_flags:
            self._build(self.state)

    def _count_skips(self):
        self._skips = self._skips + 1 if self.last_step_skipped else 0
        if self._skips >= MAX_CONSECUTIVE_SKIPS:
            raise RuntimeError(f"{self._skips} steps in a row were skipped because a gradient was not finite: lower the learning rate, the loss "
                               "scale or max_grad_norm, or freeze the variance later")

    # ---- what the ranks must have in common

    def _check_ranks(self):
        """At the first step the ranks compare their layout and a checksum of the parameters."""
        params = [p for group in self.param_groups for p in group["params"]]
        if not self._ranks_checked:
            check_same_on_all_ranks(
                self.communicator, [self._describe(), *self._describe_parameters()], params[0].device,
                "Build the same model and optimizer on every rank, then call onebit.broadcast_parameters(model) before the first step",
            )
            self._ranks_checked = True
        check_dense(params, self._names())

    def _describe(self):
        return f"{type(self).__name__} after {self.steps} steps, max_grad_norm={self.max_grad_norm}, check_finite={self.check_finite}"

    def _describe_parameters(self):
        names = self._names()
        for group in self.param_groups:
            options = ", ".join(f"{key}={group[key]}" for key in self.defaults)
            for p in group["params"]:
                sparse = p.grad is not None and p.grad.layout != torch.strided
                yield (f"{next(names)}: shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}, {options}"
                       f"{', a sparse gradient' if sparse else ''}, checksum {checksum(p):08x}")

    # ---- traffic

    def _wire(self):
        return self.communicator.bytes_sent, self.communicator.bytes_received, self.communicator.calls

    def _traffic_since(self, before):
        ranks = self.communicator.size
        exact = sum(2 * (ranks - 1) * sum(part.layout.numels) * part.wire_dtype.itemsize // ranks for part in self._parts)
        return Traffic(*(now - then for now, then in zip(self._wire(), before)), exact)

    @property
    def communication(self):
        """A frozen snapshot of this rank's traffic in `step`: bytes_sent, bytes_received, calls, compression_ratio; `.last_step` alike."""
        return Communication(**vars(self._total), last_step=self._last)

    # ---- checkpoints

    def state_dict(self):
        """As any optimizer's. Compression errors differ between ranks: let each rank save its own, or call `synchronize` first."""
        saved = super().state_dict()
        saved["param_groups"][0]["onebit"] = self._facts()
        return saved

    def _facts(self):
        """What a checkpoint holds beside tensors and options."""
        return {"rank": self.communicator.rank, "size": self.communicator.size, "errors_are_shared": self._errors_are_shared,
                "has_errors": self._has_live_errors()}

    def _has_live_errors(self):
        return self.has_errors

    def load_state_dict(self, state_dict, reset_errors=False):
        """Take over a state, also a plain torch.optim.Adam or AdamW's. State keeps its own dtype whatever the parameters'.

        Args:
            reset_errors: start with zero errors, and warn of how much is lost, where the checkpoint's belong to another rank.

        Raises ValueError if the errors belong to another rank or world size, or if the groups do not match.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        facts = groups[0].pop("onebit", {})
        drop_errors = self._check_owner(facts, reset_errors)
        known = {*self.defaults, "initial_lr", "params"}
        options = [own | {key: saved[key] for key in known & saved.keys()} for saved, own in zip(groups, self.param_groups)]
        super().load_state_dict({"state": {}, "param_groups": options + groups[len(options) :]})
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in groups for i in group["params"]]
        values = {p: dict(state_dict["state"][i]) for i, p in zip(indices, params) if i in state_dict["state"]}
        self._step.fill_(max((float(entries["step"]) for entries in values.values()), default=0.0))
        self._take_errors(values, facts, drop_errors)
        self._build(values)
        self._take_facts(facts)

    def _check_owner(self, facts, reset_errors):
        """Whether to drop the errors: raise if they are another rank's, unless `reset_errors`."""
        own = self.communicator.rank, self.communicator.size
        if not facts.get("has_errors") or facts["errors_are_shared"] or (facts["rank"], facts["size"]) == own:
            return False
        if not reset_errors:
            raise ValueError(_FOREIGN_ERRORS.format(rank=facts["rank"], size=facts["size"], own_rank=own[0], own_size=own[1]))
        return True

    def _take_errors(self, values, facts, drop):
        """Leave in `values` the errors that this rank takes over; a shared error has no server part."""
        unwanted = {"worker_error", "server_error"} if drop else {"server_error"} if facts.get("errors_are_shared") else set()
        lost = sum(float(v["worker_error"].double().square().sum()) for v in values.values() if drop and "worker_error" in v) ** 0.5
        for entries in values.values():
            for name in unwanted:
                entries.pop(name, None)
        if drop:
            warnings.warn(f"the compression errors of the checkpoint were reset: a worker error of l2 norm {lost:.3g} is lost", stacklevel=3)

    def _take_facts(self, facts):
        self._errors_are_shared = facts.get("errors_are_shared", False)
        self._ranks_checked = False

    def restart_warmup(self, steps):
        """Only 1-bit optimizers with a frozen variance have a warm-up to restart."""
        raise ValueError(f"{type(self).__name__} has no warm-up to restart")

    def synchronize(self):
        """Make the state the same on all ranks, so that one checkpoint serves them all. All ranks must call it."""
