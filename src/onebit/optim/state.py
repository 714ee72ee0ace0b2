"""Parameter groups, their flat state, and checkpoints of it: what an optimizer is when it does not step."""

import torch

from onebit.optim.checkpoint import (
    ParameterState,
    check_shapes,
    check_state,
    errors_to_take,
    warn_of_lost_errors,
)
from onebit.optim.flat import FlatState, buckets
from onebit.optim.options import (
    ONLY_TORCH,
    check_group,
    check_tensors,
    option_names,
    reject_misspelt,
    reject_not_of_a_group,
)


class FlatOptimizer(torch.optim.Optimizer):
    """Holds the parameters in parts, `onebit.optim.flat.FlatState`: the buckets of compressed groups, then those of the others.

    Args:
        params: parameters, named parameters or groups.
        options: defaults of the groups' options.
        communicator: see `onebit.comm`.
        bucket_cap: bytes of a bucket at most; None: one bucket.
    """

    has_errors = False
    takes_frozen_variance = False
    vectors = {
        "momentum": "exp_avg",
        "variance": "exp_avg_sq",
    }  # what is kept for each element: its name here -> torch's, in `state`
    more_vectors = {}  # the same, of compressed groups only
    numbers = {}  # what is kept for each tensor: its name here and in `state` -> the value at the start
    sent_options = ("betas",)  # options of a group on which it depends what is sent

    def __init__(self, params, options, communicator, bucket_cap):
        self.communicator = communicator
        self._bucket_cap = bucket_cap
        self._errors_are_shared = False  # whether all ranks hold the same
        self._step = torch.zeros(())
        self._parts = []
        options = options | {"compress": True}
        self._group_options = tuple(options)
        super().__init__(params, options)
        self._build({})

    def __getstate__(self):
        raise TypeError(
            "an optimizer that communicates can be neither copied nor pickled: copy or save its state_dict()"
        )

    # ---- groups and state

    def add_param_group(self, group):
        if self._step:
            raise ValueError(
                "a parameter group cannot be added after the first step: its variance would be younger than the others'. Give all "
                "parameters at construction; one with requires_grad=False is left alone until you set it True, before the freeze"
            )
        if isinstance(group, dict):
            reject_misspelt(group, self._group_options, type(self).__name__)
            reject_not_of_a_group(
                group, self._group_options, option_names(type(self).__init__), type(self).__name__
            )
        super().add_param_group(group)
        try:
            check_group(self.param_groups[-1], self._group_options)
            check_tensors(self._params())
        except ValueError:
            self.param_groups.pop()
            raise
        if self._parts:
            self._build({})

    def _build(self, moments):
        """Lay the parameters out and make their state, taking over `moments`: for each parameter its vectors, by torch's names."""
        flags = [group["compress"] for group in self.param_groups]
        if self.has_errors and not any(flags):
            raise ValueError(
                f"every parameter group has compress=False, so nothing would be compressed: use onebit.DistributedAdam, or "
                f"{type(self).__name__} with a group to compress"
            )
        self._compress_flags = flags
        self._parts = [
            FlatState(
                bucket,
                self.communicator.size,
                compress,
                self.vectors | (self.more_vectors if compress else {}),
                self.numbers,
            )
            for compress in (True, False)
            for bucket in buckets(
                [group for group in self.param_groups if group["compress"] == compress],
                self._bucket_cap,
            )
        ]
        for part in self._parts:
            for p, entries in zip(part.params, part.stored()):
                for name in entries.keys() & moments.get(p, {}).keys():
                    entries[name].copy_(moments[p][name])
            self._show_state(part)

    def _show_state(self, part):
        """Bring `state[p]` into line with how a part is stored."""
        for i, (p, entries) in enumerate(zip(part.params, part.stored())):
            self.state[p] = ParameterState({"step": self._step} | entries, part, i)

    @property
    def _compressed(self):
        """The parts whose groups ask for compression."""
        return [part for part in self._parts if part.compress]

    @property
    def _holds_errors(self):
        return any(part.allreduce for part in self._parts)

    def _params(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self):
        """A name for each parameter, in the groups' order."""
        for i, group in enumerate(self.param_groups):
            yield from group.get("param_names") or (
                f"param_groups[{i}]['params'][{j}]" for j in range(len(group["params"]))
            )

    @property
    def steps(self):
        """Steps taken, without those skipped."""
        return int(self._step)

    def _must_be_idle(self, what):
        """Raise RuntimeError if an exchange is under way, which `what` would disturb."""

    def _check_flags(self):
        """Lay the parameters out anew if a group's `compress` has changed; errors belong to a layout, so there must be none."""
        if [group["compress"] for group in self.param_groups] == self._compress_flags:
            return
        self._must_be_idle("compress was changed")
        if self._holds_errors:
            way = (
                "Set it back, call restart_warmup(steps), then change it"
                if self.takes_frozen_variance
                else "Set it back, or begin a new optimizer"
            )
            raise ValueError(
                f"compress was changed while compression errors are held: it may change in the warm-up of OneBitAdam only. {way}"
            )
        self._relayout(
            {
                p: {name: entries[name] for name in (*self.vectors.values(), *self.numbers)}
                for p, entries in self.state.items()
            }
        )

    def _relayout(self, moments):
        self._build(moments)

    # ---- checkpoints

    def state_dict(self):
        """As any optimizer's. Compression errors differ between ranks: let each rank save its own file, or call `synchronize` first.

        torch.distributed.checkpoint takes every tensor from some one rank: with it, always call `synchronize` first.
        """
        saved = super().state_dict()
        entries = {}
        for part in self._parts:
            entries |= dict(
                zip(part.params, part.everything(errors=part.compress and self.has_errors))
            )
        saved["state"] = {
            i: {"step": self._step} | entries[p] for i, p in enumerate(self._params())
        }
        saved["param_groups"][0]["onebit"] = self._facts()
        return saved

    def _facts(self):
        """What a checkpoint holds beside tensors and options."""
        return {
            "kind": type(self).__name__,
            "rank": self.communicator.rank,
            "size": self.communicator.size,
            "chunks": self._chunks(),
            "holds_errors": self._holds_errors,
            "errors_are_shared": self._errors_are_shared,
        }

    def _chunks(self):
        """What the server errors belong to: for each compressed part its number of parameters and the length of a chunk."""
        return [(len(part.params), part.layout.chunk) for part in self._compressed]

    def load_state_dict(self, state_dict, reset_errors=False):
        """Take over a state, also that of torch's optimizer of the same kind (Adam, AdamW, SGD). State keeps its own dtype whatever the parameters'.

        Args:
            reset_errors: start with zero errors, and warn of how much is lost, where the checkpoint's belong to another rank.

        Raises ValueError if the state is another optimizer's, if the errors belong to another rank or world size, or if the groups do not match.
        """
        self._must_be_idle("load_state_dict was called")
        check_state(state_dict, self.vectors.values(), self._group_options, type(self).__name__)
        groups = [dict(group) for group in state_dict["param_groups"]]
        facts = groups[0].pop("onebit", {})
        self._check_kind(facts)
        errors = errors_to_take(
            facts,
            type(self).__name__,
            self.communicator.rank,
            self.communicator.size,
            self._chunks(),
            reset_errors,
        )
        indices = [i for group in groups for i in group["params"]]
        vectors = {*self.vectors.values(), *self.more_vectors.values()}
        names = {*vectors, *self.numbers, *errors}
        saved = [
            {
                name: value
                for name, value in state_dict["state"].get(i, {}).items()
                if name in names and value is not None
            }
            for i in indices
        ]
        check_shapes(self._params(), self._names(), saved, vectors | {"worker_error"})
        if not errors:
            warn_of_lost_errors(state_dict["state"])
        options = [
            own
            | {
                key: value
                for key, value in group.items()
                if key not in (*ONLY_TORCH, "param_names")
            }
            for group, own in zip(groups, self.param_groups)
        ]
        super().load_state_dict({"state": {}, "param_groups": options + groups[len(options) :]})
        self._step.fill_(
            max(
                (float(entries.get("step", 0)) for entries in state_dict["state"].values()),
                default=0.0,
            )
        )
        saved = dict(zip(self._params(), saved))
        self._build(saved)
        self._take_facts(facts)
        for part in [part for part in self._parts if part.allreduce and errors]:
            self._take_errors(part, [saved[p] for p in part.params])

    def _check_kind(self, facts):
        """Raise ValueError if a checkpoint's state means something else than this optimizer's."""
        if (
            not facts.get("is_synced", True)
            and facts["size"] > 1
            and facts["kind"] != type(self).__name__
        ):
            raise ValueError(
                f"this checkpoint was saved between two syncs, when each rank had a model of its own: load it into "
                f"onebit.{facts['kind']}, each rank its own file, call optimizer.synchronize() and save model and state anew"
            )
        frozen = (
            facts.get("variance_is_corrected")
            or "variance_steps" in facts
            and facts["holds_errors"]
        )
        if frozen and not self.takes_frozen_variance:
            raise ValueError(
                f"this checkpoint holds a frozen variance: load it into onebit.{facts.get('kind', 'OneBitAdam')}, and call "
                "restart_warmup(steps) to go on exactly"
            )
        if "variance_updates" in facts and facts["kind"] != type(self).__name__:
            raise ValueError(
                f"this checkpoint's variance was not updated at every step: load it into onebit.{facts['kind']}"
            )

    def _take_facts(self, facts):
        self._errors_are_shared = facts.get("errors_are_shared", False)

    def _take_errors(self, part, entries):
        """The compression errors of a part, from the entries saved for its parameters."""
        worker_error = part.partition.zeros(part.dtype)
        for view, entry in zip(part.layout.views(worker_error), entries):
            view.copy_(entry["worker_error"])
        part.allreduce.worker_error = worker_error
        if "server_error" in entries[0]:
            part.allreduce.server_error = entries[0]["server_error"].to(worker_error)

    def restart_warmup(self, steps):
        """Go back to exact Adam for `steps` steps; nothing changes for an optimizer that never freezes its variance."""

    def synchronize(self):
        """Give every rank the same state, so that one checkpoint serves all ranks, and any number of them. All ranks must call it.

        Each worker error becomes mean_i delta_i + delta_bar and the server error 0, by one exact all_reduce: what the errors hold
        together does not change.
        """
        self._must_be_idle("synchronize was called")
        for part in [part for part in self._parts if part.allreduce]:
            part.allreduce.worker_error = part.allreduce.total_error()
            part.allreduce.server_error = torch.zeros_like(part.allreduce.server_error)
            self._errors_are_shared = True
