"""Saving and loading an optimizer.

A checkpoint is torch's, with the entries of every parameter under "state" and a dictionary of
facts, "onebit", in every parameter group, so that a part of the groups has it too. The facts say
whose the state is and what it means; without them it is taken for that of a torch optimizer.
"""

import copy
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import torch

from onebit.optim.bucket import Bucket
from onebit.optim.loadable import Facts, Loadable, check, chunks_of, meaning_of_options

if TYPE_CHECKING:
    from onebit.optim.optimizer import DistributedOptimizer


# ---- save


def saved(optimizer: "DistributedOptimizer") -> dict[str, Any]:
    """The optimizer's checkpoint. Nothing in it is shared with another entry or the optimizer."""
    run = optimizer._run
    entries: dict[torch.Tensor, dict[str, Any]] = {}
    for bucket in run.buckets:
        errors = bucket.compress and optimizer.compresses
        entries |= zip(bucket.params, bucket.copies(errors))
    state: dict[Any, Any] = {
        i: {"step": run.step.clone()} | entries[p] | unshared(_foreign(optimizer, p))
        for i, p in enumerate(optimizer._params())
    }
    state |= {key: unshared(x) for key, x in optimizer.state.items() if key not in entries}
    groups, first = [], 0
    for group in optimizer.param_groups:
        options = {name: unshared(x) for name, x in group.items() if name != "params"}
        places = list(range(first, first + len(group["params"])))
        groups.append(options | {"params": places, "onebit": unshared(facts_of(optimizer))})
        first += len(places)
    return {"state": state, "param_groups": groups}


def _foreign(optimizer: "DistributedOptimizer", p: torch.Tensor) -> dict[str, Any]:
    """What somebody else keeps with a parameter."""
    own, found = optimizer._run.shown[p], optimizer.state.get(p)
    return own.foreign() if found is own else {}


def unshared(value: Any) -> Any:
    """A copy of all tensors in a value, none of which is a view of something larger."""
    if torch.is_tensor(value):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {name: unshared(x) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(unshared(x) for x in value)
    return value


def facts_of(optimizer: "DistributedOptimizer") -> Facts:
    """What a checkpoint holds beside tensors and options."""
    return {
        "kind": type(optimizer).__name__,
        "rank": optimizer.communicator.rank,
        "size": optimizer.communicator.size,
        "chunks": chunks_of(optimizer),
        "holds_errors": optimizer._is_compressing,
        "errors_are_shared": optimizer._run.errors_are_shared,
        "meaning": meaning_of_options(optimizer),
        "with_gradient": flags_of(optimizer, optimizer._run.with_gradient),
    } | optimizer._facts()


def flags_of(optimizer: "DistributedOptimizer", chosen: Container[torch.Tensor]) -> torch.Tensor:
    """Which parameters are among the chosen ones, bool [parameters]."""
    return torch.tensor([p in chosen for p in optimizer._params()], device="cpu")


def places(found: Any) -> list[int]:
    """The places that are set in what `flags_of` has given; files of old have the places."""
    return found.nonzero().flatten().tolist() if torch.is_tensor(found) else list(found)


# ---- load


def load(optimizer: "DistributedOptimizer", state_dict: dict[str, Any], reset_errors: bool) -> None:
    """Let the optimizer go on from `state_dict`. See `DistributedOptimizer.load_state_dict`.

    All is checked before anything changes.
    """
    optimizer._must_be_idle("load_state_dict was called")
    found = check(optimizer, state_dict, reset_errors)
    run = optimizer._run
    for own, group in zip(optimizer.param_groups, found.groups):
        own.update(copy.deepcopy(group))
    optimizer.state.clear()
    run.shown = {}
    run.step.fill_(found.steps)
    entries = dict(zip(optimizer._params(), found.entries))
    optimizer._lay_out(entries)
    optimizer._take_facts(found.facts | {"moved": _places_here(found, "moved")})
    for bucket in run.buckets if found.errors else ():
        if bucket.allreduce:
            _take_errors(bucket, [entries[p] for p in bucket.params], found.errors)
    run.with_gradient.clear()
    run.with_gradient.update(_with_gradient(optimizer, found))
    _take_foreign(optimizer, found)


def _with_gradient(optimizer: "DistributedOptimizer", found: Loadable) -> Iterable[torch.Tensor]:
    """The parameters that have had a gradient: by the facts or by their state."""
    if "with_gradient" in found.facts:
        params = optimizer._params()
        return [params[i] for i in _places_here(found, "with_gradient")]
    return [
        p
        for p, entries in zip(optimizer._params(), found.entries)
        if any(bool(x.any()) for x in entries.values())
    ]


def _places_here(found: Loadable, fact: str) -> list[int]:
    """The `places` of a fact, counted in this optimizer's order of parameters."""
    saved_places = places(found.facts.get(fact, []))
    return [i for i, place in enumerate(found.order) if place in saved_places]


def _take_errors(bucket: Bucket, entries: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """The compression errors of a bucket, from the entries saved for its parameters."""
    worker_error = bucket.partition.zeros(bucket.dtype)
    for view, entry in zip(bucket.layout.views(worker_error), entries):
        view.copy_(entry["worker_error"])
    bucket.allreduce.worker_error = worker_error
    if "server_error" in names:
        bucket.allreduce.server_error = entries[0]["server_error"].to(worker_error)


def _take_foreign(optimizer: "DistributedOptimizer", found: Loadable) -> None:
    """What somebody else kept in the saved optimizer's state."""
    for p, foreign in zip(optimizer._params(), found.foreign_entries):
        for name, value in foreign.items():
            optimizer.state[p][name] = copy.deepcopy(value)
    for key, value in found.foreign.items():
        optimizer.state[key] = copy.deepcopy(value)
