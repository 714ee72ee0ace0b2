"""What of a checkpoint an optimizer may take over, found before anything changes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from onebit.optim import notices
from onebit.optim.validation import ONLY_TORCH, check_group, describe_option

if TYPE_CHECKING:
    from onebit.optim.optimizer import DistributedOptimizer

ERRORS = ("worker_error", "server_error")
# the names of entries that torch's optimizers, too, save; and those of this family alone
TORCHS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
FAMILYS = (
    *ERRORS,
    "accumulator",
    "synced_parameter",
    "average_exp_avg_sq",
    "exp_avg_sq_fresh",
    "coefficient",
    "coefficient_average",
    "ratio",
    "scaling",
)
# options on which it depends what the numbers of the compressed phase mean
MEANINGFUL = ("bias_correction", "variance_floor", "compressor")
Facts = dict[str, Any]


@dataclass
class Loadable:
    """A checkpoint that was checked, in the order of the optimizer's own parameters.

    Attributes:
        groups: for each group the options that it will have, without its parameters.
        entries: for each parameter what the optimizer takes over.
        foreign_entries: for each parameter what others kept with it.
        foreign: what others kept beside the parameters.
        steps: the count of steps.
        facts: see `onebit.optim.checkpoint`.
        errors: the names of the compression errors that are taken over.
        order: for each parameter its place in the checkpoint.
    """

    groups: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    foreign_entries: list[dict[str, Any]]
    foreign: dict[Any, Any]
    steps: float
    facts: Facts
    errors: tuple[str, ...]
    order: list[int]


def check(
    optimizer: "DistributedOptimizer", state_dict: Mapping[str, Any], reset_errors: bool
) -> Loadable:
    """Raise ValueError, with the reason and the remedy, unless all of the checkpoint fits."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    facts: Facts = next((group["onebit"] for group in groups if "onebit" in group), {})
    indices = [i for group in groups for i in group["params"]]
    state = {i: dict(state_dict["state"].get(i, {})) for i in indices}
    foreign = {key: x for key, x in state_dict["state"].items() if key not in state}
    kind = type(optimizer).__name__
    _check_kept(state, optimizer.vectors.values(), kind)
    _check_groups(groups, optimizer._group_options, kind)
    _check_has_facts(state, facts)
    _check_numbers_of_parameters(optimizer, groups)
    order = order_of(optimizer, groups)
    options = _new_options(optimizer, groups, order)
    check_facts(optimizer, facts)
    optimizer._check_facts(facts, options)
    errors = errors_to_take(optimizer, facts, reset_errors, order == sorted(order))
    _check_meaning(optimizer, facts, errors)
    if not errors:
        _warn_of_lost_errors(state)
    entries = _entries_to_take(optimizer, [state[indices[i]] for i in order], errors)
    _check_complete(optimizer, entries, options, facts, errors)
    _check_entries(optimizer, entries)
    foreign_entries = [
        {name: x for name, x in state[indices[i]].items() if name not in (*TORCHS, *FAMILYS)}
        for i in order
    ]
    steps = _steps(state.values(), facts)
    return Loadable(options, entries, foreign_entries, foreign, steps, facts, errors, order)


def chunks_of(optimizer: "DistributedOptimizer") -> list[tuple[int, int]]:
    """What the server errors belong to: for each compressed bucket its number of parameters and
    the length of a chunk."""
    return [(len(bucket.params), bucket.layout.chunk) for bucket in optimizer._compressed]


def meaning_of_options(optimizer: "DistributedOptimizer") -> dict[str, str]:
    """The options on which it depends what the numbers of the compressed phase mean."""
    options = optimizer._run.options
    return {name: describe_option(options[name]) for name in MEANINGFUL if name in options}


# ---- whose parameter is whose


def order_of(optimizer: "DistributedOptimizer", groups: list[dict]) -> list[int]:
    """For each of the optimizer's parameters its place in the checkpoint.

    Parameters are matched by name if each group has the same names on both sides, else by place;
    then a name may not stand for two different places. Raises ValueError if it does.
    """
    order: list[int] = []
    ours_all = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    for own, saved in zip(optimizer.param_groups, groups):
        places = range(len(order), len(order) + len(own["params"]))
        ours, theirs = own.get("param_names"), saved.get("param_names")
        if ours and theirs and sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours):
            order += [places.start + theirs.index(name) for name in ours]
            continue
        for mine, name in zip(ours or [], theirs or []):
            if mine != name and name in ours_all:
                raise ValueError(
                    f"the state_dict has {name} where this optimizer has {mine}, and its other "
                    "names are not this optimizer's: give the optimizer the parameters that were "
                    "saved, under their names, or rename those of the state_dict"
                )
        order += places
    return order


def _check_numbers_of_parameters(optimizer: "DistributedOptimizer", groups: list[dict]) -> None:
    theirs, ours = ([len(g["params"]) for g in x] for x in (groups, optimizer.param_groups))
    if theirs != ours:
        raise ValueError(
            "the state_dict is another model's, or its parameters are grouped otherwise: the "
            f"numbers of parameters in each parameter group are {theirs} there and {ours} here"
        )


def _new_options(
    optimizer: "DistributedOptimizer", groups: list[dict], order: list[int]
) -> list[dict[str, Any]]:
    """The groups' options as they will be. Raises ValueError if one is out of range."""
    found = []
    for own, saved in zip(optimizer.param_groups, groups):
        left_out = ["params", "onebit", *ONLY_TORCH]
        if order != sorted(order):  # then the names are the same, in this optimizer's order
            left_out.append("param_names")
        taken = {name: value for name, value in saved.items() if name not in left_out}
        found.append({name: x for name, x in own.items() if name != "params"} | taken)
        check_group(found[-1], optimizer._group_options)
    if optimizer.compresses and not any(group["compress"] for group in found):
        raise ValueError("the state_dict has compress=False for every parameter group")
    return found


# ---- the numbers


def _check_has_facts(state: Mapping[Any, dict], facts: Facts) -> None:
    """Raise ValueError if a state of this family has lost what says what it means."""
    names = {name for entries in state.values() for name in entries}
    if facts or not (names & {*FAMILYS} or {"step", "momentum_buffer"} <= names):
        return
    raise ValueError(
        "this state_dict was saved by an optimizer of onebit, but its parameter groups lack "
        '"onebit", which says what its numbers mean: keep all keys of one group when you rebuild '
        "a state_dict"
    )


def _entries_to_take(
    optimizer: "DistributedOptimizer", state: list[dict], errors: tuple[str, ...]
) -> list[dict[str, Any]]:
    names = {*optimizer.vectors.values(), *optimizer.more_vectors.values()}
    names |= {*optimizer.tensor_scalars, *errors}
    return [
        {name: x for name, x in entries.items() if name in names and x is not None}
        for entries in state
    ]


def _check_complete(
    optimizer: "DistributedOptimizer",
    entries: list[dict],
    groups: list[dict],
    facts: Facts,
    errors: tuple[str, ...],
) -> None:
    """Raise ValueError if a state of an optimizer of this kind lacks an entry of a parameter.

    A state of another kind, or of torch, may lack all of a parameter that was never trained.
    """
    if facts.get("kind") != type(optimizer).__name__:
        return
    own = {*optimizer.vectors.values(), *optimizer.tensor_scalars}
    compressed = own | {*optimizer.more_vectors.values(), *(("worker_error",) if errors else ())}
    flags = [
        new["compress"] for new, old in zip(groups, optimizer.param_groups) for _ in old["params"]
    ]
    served = {bucket.params[0] for bucket in optimizer._compressed if "server_error" in errors}
    for p, name, entry, compress in zip(optimizer._params(), optimizer._names(), entries, flags):
        needed = (compressed if compress else own) | ({"server_error"} if p in served else set())
        missing = sorted(needed - entry.keys())
        if missing:
            raise ValueError(
                f"the state_dict lacks {', '.join(missing)} of {name}: a part of it was lost. "
                "Load the state_dict as it was saved"
            )


def _check_entries(optimizer: "DistributedOptimizer", entries: list[dict]) -> None:
    """Raise ValueError if an entry has another shape or impossible values."""
    chunks = {bucket.params[0]: bucket.layout.chunk for bucket in optimizer._compressed}
    for p, name, entry in zip(optimizer._params(), optimizer._names(), entries):
        for key, x in entry.items():
            if not torch.is_tensor(x) or not x.is_floating_point():
                raise ValueError(f"{key} of {name} must be a floating-point tensor, not {x!r}")
            shape: tuple = tuple(p.shape)
            if key in optimizer.tensor_scalars:
                shape = ()
            if key == "server_error":
                shape = (chunks.get(p, x.numel()),)
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"the state_dict has {key} of shape {tuple(x.shape)} for {name}, and needs "
                    f"shape {shape} here: it is another model's, or was saved with the parameters "
                    "in another order; give them in the order in which they were saved"
                )
            if not torch.isfinite(x).all() or ("exp_avg_sq" in key and bool((x < 0).any())):
                raise ValueError(
                    f"{key} of {name} in the state_dict has numbers that are not finite, or a "
                    "negative variance: the file is damaged, or training had diverged. Load an "
                    "earlier one"
                )


def _steps(state: Iterable[dict], facts: Facts) -> float:
    """The count of steps. Raises ValueError if there cannot be one."""
    counts = {float(entries["step"]) for entries in state if entries.get("step") is not None}
    for count in counts:
        if not isfinite(count) or count < 0 or count != int(count):
            raise ValueError(
                f"the state_dict says that {count} steps were taken: it must be a whole number"
            )
    if facts and len(counts) > 1:
        raise ValueError(
            f"the parameters of the state_dict were saved after {sorted(counts)} steps: it was put "
            "together of several, whose moments and errors do not belong together"
        )
    return max(counts, default=0.0)


def _check_meaning(
    optimizer: "DistributedOptimizer", facts: Facts, errors: tuple[str, ...]
) -> None:
    """Raise ValueError if numbers of the compressed phase were saved under other options."""
    if not facts.get("holds_errors"):
        return
    frozen = ("bias_correction", "variance_floor") if "variance_steps" in facts else ()
    saved, ours = facts.get("meaning", {}), meaning_of_options(optimizer)
    for name in (*frozen, *(("compressor",) if errors else ())):
        if name in saved and name in ours and saved[name] != ours[name]:
            raise ValueError(
                f"this checkpoint was saved in the compressed phase with {name}={saved[name]}, and "
                f"this optimizer has {name}={ours[name]}, under which its variance and errors mean "
                "something else: make the optimizer with the saved one, load, call "
                "restart_warmup(steps) and save before you change it"
            )


# ---- whose state it is


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
    optimizer: "DistributedOptimizer", facts: Facts, reset_errors: bool, same_order: bool = True
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
    if same_place and same_order and chunks == chunks_of(optimizer):
        return ERRORS
    if reset_errors:
        return ()
    if same_place:
        raise ValueError(
            "this checkpoint's compression errors belong to other buckets: set bucket_cap_mb, "
            "the groups' compress and the order of parameters as they were when it was saved; or "
            "call optimizer.synchronize() before saving; or load_state_dict(..., reset_errors="
            "True) to go on without what they hold"
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
