"""All that this package knows of the inside of onebit's optimizers and of their checkpoints."""

from typing import Any

import torch

from onebit.optim.optimizer import DistributedOptimizer

Optimizer = DistributedOptimizer
Engine = Any  # deepspeed.DeepSpeedEngine, which this package imports only when it is needed
ERRORS = ("worker_error", "server_error")


def rebuild(optimizer: Optimizer) -> None:
    """Lay the state out anew for the parameters that are now in the groups."""
    optimizer.state.clear()
    optimizer._lay_out({})
    optimizer._run.ranks_are_compared = False


def has_foreign_parameters(optimizer: Optimizer) -> bool:
    """Whether the groups hold other parameters than the state, or of another type."""
    known = {p: dtype for b in optimizer._run.buckets for p, dtype in zip(b.params, b.dtypes)}
    return any(known.get(p) != p.dtype for p in optimizer._params())


def facts_of(state_dict: dict) -> dict:
    """What a checkpoint of onebit's holds beside tensors and options; empty if it is another's."""
    return state_dict["param_groups"][0].get("onebit", {})


def with_facts(state_dict: dict, facts: dict) -> dict:
    first, *others = state_dict["param_groups"]
    return state_dict | {"param_groups": [first | {"onebit": facts}, *others]}


def same_on_all_ranks(facts: dict) -> bool:
    """Whether one rank's state serves all: without errors, or with those `synchronize` shared."""
    if not facts.get("is_synced", True):
        return False
    return not facts.get("holds_errors") or facts.get("errors_are_shared", False)


def is_synced(facts: dict) -> bool:
    """Whether all ranks hold the same parameters; not so between two syncs of 0/1 Adam."""
    return facts.get("is_synced", True)


def server_errors(optimizer: Optimizer, vectors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """What this rank serves of errors that are given for each parameter, in the groups' order.

    Returns: the index of the first parameter of each bucket -> float [chunk].
    """
    index = {p: i for i, p in enumerate(optimizer._params())}
    return {
        index[bucket.params[0]]: bucket.flat([vectors[index[p]] for p in bucket.params])
        .view(optimizer.communicator.size, -1)[optimizer.communicator.rank]
        .clone()
        for bucket in optimizer._compressed
    }


def interval_scalers(optimizer: Optimizer) -> tuple[int, int]:
    """0/1 Adam: after how many updates of the variance, and syncs, their distance doubles."""
    sets = optimizer._run.sets
    return sets.variance_update_scaler, sets.local_step_scaler
