"""Saving and loading an optimizer, and what of a checkpoint it may take over.

A checkpoint is torch's, with the entries of every parameter under "state" and one dictionary of
facts, "onebit", in the first parameter group. The facts say whose the state is and what it means;
without them it is taken for that of a torch optimizer.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from onebit.optim import notices
from onebit.optim.bucket import Bucket
from onebit.optim.validation import ONLY_TORCH

if TYPE_CHECKING:
    from onebit.optim.optimizer import DistributedOptimizer

ERRORS = ("worker_error", "server_error")
Facts = dict[str, Any]


class ParameterState(dict):
    """A parameter's entries in `optimizer.state`.

    It contains what is stored; the other entries of the parameter's checkpoint are computed when
    asked for by name.
    """

    def __init__(self, stored: dict[str, torch.Tensor], bucket: Bucket, index: int) -> None:
        super().__init__(stored)
        self._bucket, self._index = bucket, index

    def __missing__(self, name: str) -> torch.Tensor:
        return self._bucket.computed(name, self._index)


# ---- save


def saved(optimizer: "DistributedOptimizer", state_dict: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's checkpoint, of which `state_dict` has torch's part."""
    run = optimizer._run
    entries: dict[torch.Tensor, dict[str, Any]] = {}
    for bucket in run.buckets:
        errors = bucket.compress and optimizer.compresses
        entries |= zip(bucket.params, bucket.everything(errors=errors))
    state_dict["state"] = {
        i: {"step": run.step} | entries[p] for i, p in enumerate(optimizer._params())
    }
    state_dict["param_groups"][0]["onebit"] = facts_of(optimizer)
    return state_dict


def facts_of(optimizer: "DistributedOptimizer") -> Facts:
    """What a checkpoint holds beside tensors and options."""
    return {
        "kind": type(optimizer).__name__,
        "rank": optimizer.communicator.rank,
        "size": optimizer.communicator.size,
        "chunks": chunks_of(optimizer),
        "holds_errors": optimizer._is_compressing,
        "errors_are_shared": optimizer._run.errors_are_shared,
    } | optimizer._facts()


def chunks_of(optimizer: "DistributedOptimizer") -> list[tuple[int, int]]:
    """What the server errors belong to: for each compressed bucket its number of parameters and
    the length of a chunk."""
    return [(len(bucket.params), bucket.layout.chunk) for bucket in optimizer._compressed]


# ---- load


def load(
    optimizer: "DistributedOptimizer",
    load_into_torch: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    reset_errors: bool,
) -> None:
    """Let the optimizer go on from `state_dict`. See `DistributedOptimizer.load_state_dict`.

    Args:
        load_into_torch: what torch's own optimizer does to load a state.
    """
    optimizer._must_be_idle("load_state_dict was called")
    state, groups = state_dict["state"], [dict(group) for group in state_dict["param_groups"]]
    facts = groups[0].pop("onebit", {})
    kind = type(optimizer).__name__
    vectors = {*optimizer.vectors.values(), *optimizer.more_vectors.values()}
    _check_kept(state, optimizer.vectors.values(), kind)
    _check_groups(groups, optimizer._group_options, kind)
    _check_model(optimizer, groups, state, vectors | {"worker_error"})
    check_facts(optimizer, facts)
    optimizer._check_facts(facts)
    errors = errors_to_take(optimizer, facts, reset_errors)
    if not errors:
        _warn_of_lost_errors(state)
    names = {*vectors, *optimizer.tensor_scalars, *errors}
    entries = [
        {name: x for name, x in state.get(i, {}).items() if name in names and x is not None}
        for group in groups
        for i in group["params"]
    ]
    _load_groups(optimizer, load_into_torch, groups)
    counts = (float(own.get("step", 0)) for own in state.values())
    optimizer._run.step.fill_(max(counts, default=0.0))
    entries_of = dict(zip(optimizer._params(), entries))
    optimizer._lay_out(entries_of)
    optimizer._take_facts(facts)
    for bucket in optimizer._run.buckets if errors else ():
        if bucket.allreduce:
            _take_errors(bucket, [entries_of[p] for p in bucket.params])


def _load_groups(
    optimizer: "DistributedOptimizer",
    load_into_torch: Callable[[dict[str, Any]], None],
    groups: list[dict[str, Any]],
) -> None:
    """Take over the groups' options, and forget the state.

    torch replaces both collections. They are kept, for whoever holds them: see `RunState`.
    """
    left_out = (*ONLY_TORCH, "param_names")
    groups = [
        own | {name: value for name, value in group.items() if name not in left_out}
        for group, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    own_groups, own_state = optimizer.param_groups, optimizer.state
    load_into_torch({"state": {}, "param_groups": groups})
    own_groups[:] = optimizer.param_groups
    own_state.clear()
    optimizer.param_groups, optimizer.state = own_groups, own_state


def _take_errors(bucket: Bucket, entries: list[dict[str, torch.Tensor]]) -> None:
    """The compression errors of a bucket, from the entries saved for its parameters."""
    worker_error = bucket.partition.zeros(bucket.dtype)
    for view, entry in zip(bucket.layout.views(worker_error), entries):
        view.copy_(entry["worker_error"])
    bucket.allreduce.worker_error = worker_error
    if "server_error" in entries[0]:
        bucket.allreduce.server_error = entries[0]["server_error"].to(worker_error)


# ---- what may be loaded


def check_facts(optimizer: "DistributedOptimizer", facts: Facts) -> None:
    """Raise ValueError if a checkpoint's state means something that this optimizer cannot take."""
    kind, ours = facts.get("kind"), type(optimizer).__name__
    place = _place(optimizer)
    is_synced, saved_at = facts.get("is_synced", True), (facts.get("rank"), facts.get("size"))
    if not is_synced and facts["size"] > 1 and kind != ours:
        raise ValueError(
            "this checkpoint was saved between two syncs, when each rank had a model of its own: "
            f"load it into onebit.{kind}, each rank its own file, call optimizer.synchronize() and "
            "save model and state anew"
        )
    frozen = facts.get("variance_is_corrected") or (
        "variance_steps" in facts and facts["holds_errors"]
    )
    if frozen and not optimizer.takes_frozen_variance:
        raise ValueError(
            "this checkpoint holds a frozen variance: load it into "
            f"onebit.{facts.get('kind', 'OneBitAdam')}, and call restart_warmup(steps) to go on "
            "exactly"
        )
    if "variance_updates" in facts and kind != ours:
        raise ValueError(
            f"this checkpoint's variance was not updated at every step: load it into onebit.{kind}"
        )
    if not is_synced and optimizer.trains_apart and saved_at != place:
        raise ValueError(
            f"this checkpoint was saved between two syncs, when rank {saved_at[0]} of "
            f"{saved_at[1]} had a model of its own, and this is rank {place[0]} of {place[1]}: "
            "call optimizer.synchronize() before saving, or let each rank load its own file"
        )


def errors_to_take(
    optimizer: "DistributedOptimizer", facts: Facts, reset_errors: bool
) -> tuple[str, ...]:
    """The names of the compression errors that this rank takes over.

    Errors that all ranks share have no server part. Raises ValueError if the errors are another
    optimizer's or rank's, or belong to other buckets, unless `reset_errors`.
    """
    if not facts.get("holds_errors"):
        return ()
    ours, rank, size = type(optimizer).__name__, *_place(optimizer)
    if facts.get("kind", ours) != ours:
        if reset_errors:
            return ()
        raise ValueError(
            f"this checkpoint holds compression errors of {facts['kind']}, which are in other "
            f"units than those of {ours}: load it into {facts['kind']}, or "
            "load_state_dict(..., reset_errors=True) to go on without what they hold"
        )
    if facts["errors_are_shared"]:
        return ("worker_error",)
    same_place = (facts["rank"], facts["size"]) == (rank, size)
    chunks = [tuple(chunk) for chunk in facts.get("chunks", ())]
    if same_place and chunks == chunks_of(optimizer):
        return ERRORS
    if reset_errors:
        return ()
    if same_place:
        raise ValueError(
            "this checkpoint's compression errors belong to other buckets: set bucket_cap_mb and "
            "the groups' compress as they were when it was saved; or call optimizer.synchronize() "
            "before saving; or load_state_dict(..., reset_errors=True) to go on without what they "
            "hold"
        )
    raise ValueError(
        f"this checkpoint holds the compression errors of rank {facts['rank']} of "
        f"{facts['size']}, and this is rank {rank} of {size}. Either let each rank save and load "
        "its own file; or call optimizer.synchronize() before saving, then one file serves every "
        "rank and any number of ranks; or load_state_dict(..., reset_errors=True) to go on without "
        "what the errors hold"
    )


def _place(optimizer: "DistributedOptimizer") -> tuple[int, int]:
    return optimizer.communicator.rank, optimizer.communicator.size


def _check_kept(state: dict[Any, dict], own: Iterable[str], kind: str) -> None:
    """Raise ValueError if a state is not of an optimizer that keeps the vectors `own`."""
    own = list(own)
    for entries in state.values():
        found = [
            name
            for name, value in entries.items()
            if value is not None and name not in ("step", *ERRORS)
        ]
        missing = [name for name in own if name not in found]
        if found and (missing or not own):
            lack = (
                f"lacks {', '.join(missing)}" if missing else f"{kind} keeps nothing of that kind"
            )
            raise ValueError(
                f"the state_dict holds {', '.join(found)} for a parameter, and {lack}: it is "
                "another optimizer's. Load it into the one that it belongs to, and let "
                f"{kind} begin without it"
            )
        if "exp_avg_sq" in found and "step" not in entries:
            raise ValueError(
                "the state_dict holds moments, but not of how many steps, which their bias "
                'correction needs: add a "step" to each parameter\'s entries'
            )


def _check_groups(groups: list[dict], options: Iterable[str], kind: str) -> None:
    """Raise ValueError if the groups lack one of these options, or have one that is unknown here.

    Warns if weight decay means something else.
    """
    for group in groups:
        lacking = [name for name in options if name not in group and name != "compress"]
        if lacking:
            raise ValueError(
                f"the state_dict's groups lack {', '.join(lacking)}: it is another optimizer's, "
                f"whose lr and other options mean something else. Let {kind} begin without it"
            )
        for option in ("amsgrad", "maximize", "nesterov"):
            if group.get(option):
                raise ValueError(
                    f"the state_dict was made with {option}=True, which does not exist here: begin "
                    f"without its state, or set {option}=False in its groups if you mean to go on "
                    "without it"
                )
        if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
            notices.warn(
                "the state_dict is of torch.optim.Adam, which adds weight decay to the gradient. "
                "Here it is decoupled, as AdamW's, and the same number has another effect"
            )


def _check_model(
    optimizer: "DistributedOptimizer", groups: list[dict], state: dict, vectors: set[str]
) -> None:
    """Raise ValueError if a state is that of another model: other groups, or other shapes."""
    theirs, ours = ([len(g["params"]) for g in x] for x in (groups, optimizer.param_groups))
    if theirs != ours:
        raise ValueError(
            "the state_dict is another model's, or its parameters are grouped otherwise: the "
            f"numbers of parameters in each parameter group are {theirs} there and {ours} here"
        )
    indices = [i for group in groups for i in group["params"]]
    for i, p, name in zip(indices, optimizer._params(), optimizer._names(), strict=True):
        entries = state.get(i, {})
        kept = [entries[key] for key in entries.keys() & vectors if entries[key] is not None]
        for shape in {x.shape for x in kept} - {p.shape}:
            raise ValueError(
                f"the state_dict has shape {tuple(shape)} for {name}, which has shape "
                f"{tuple(p.shape)} here: it is another model's, or was saved with the parameters "
                "in another order; give them in the order in which they were saved"
            )


def _warn_of_lost_errors(state: dict[Any, dict]) -> None:
    squares = (
        float(entries["worker_error"].double().square().sum())
        for entries in state.values()
        if "worker_error" in entries
    )
    lost = sum(squares) ** 0.5
    if lost:
        notices.warn(
            "the compression errors of the checkpoint were reset: a worker error of l2 norm "
            f"{lost:.3g} is lost"
        )
