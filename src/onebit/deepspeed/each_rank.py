"""DeepSpeed saves one rank's optimizer for all; here is what belongs to each rank.

Beside DeepSpeed's file of a tag each rank writes onebit_mp_rank_00_dp_rank_01_of_02.pt: its
compression errors, and between two syncs of 0/1 Adam all of its state and its parameters. Nothing
is written where one rank's state serves all: in the warm-up, and after optimizer.synchronize().
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from onebit.deepspeed import internals
from onebit.deepspeed.half import refresh_model
from onebit.deepspeed.internals import Engine, Optimizer


def keep_each_rank(engine: Engine, optimizer: Optimizer) -> None:
    """Let the engine's save_checkpoint and load_checkpoint keep every rank's own state."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(*args, **kwargs):
        call = _arguments(save, args, kwargs)
        tag = call["tag"] if call["tag"] is not None else f"global_step{engine.global_steps}"
        _on_all_ranks(_write_own, engine, optimizer, Path(call["save_dir"], str(tag)))
        return save(*args, **kwargs)

    def load_checkpoint(*args, **kwargs):
        call = _arguments(load, args, kwargs)
        folder = _folder(call["load_dir"], call["tag"])
        if folder is None or not call["load_optimizer_states"] or call["load_module_only"]:
            return load(*args, **kwargs)
        held = optimizer.in_engine
        held.pending = _on_all_ranks(_read_own, engine, optimizer, folder)
        try:
            result = load(*args, **kwargs)
            _take_parameters(engine, optimizer, held.pending)
        finally:
            held.pending = None
        return result

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _arguments(function: Callable, args: tuple, kwargs: dict) -> dict:
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _on_all_ranks(function, *args):
    """function(*args) on each rank; a ValueError or OSError of any rank is raised on all."""
    result, error = None, None
    try:
        result = function(*args)
    except (OSError, ValueError) as caught:
        error = caught
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error and str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(errors):
        if message:
            raise ValueError(f"on rank {rank}: {message}")
    return result


# ---- files


def _folder(load_dir: str | os.PathLike, tag: str | None) -> Path | None:
    """Where DeepSpeed will look for the checkpoint; None if it will find none."""
    latest = Path(load_dir, "latest")
    if tag is None and not latest.is_file():
        return None
    return Path(load_dir, str(tag) if tag is not None else latest.read_text().strip())


def _name(engine: Engine, optimizer: Optimizer) -> str:
    model_rank = engine.mpu.get_model_parallel_rank() if engine.mpu is not None else 0
    rank, size = optimizer.communicator.rank, optimizer.communicator.size
    return f"onebit_mp_rank_{model_rank:02d}_dp_rank_{rank:02d}_of_{size:02d}.pt"


def _write_own(engine: Engine, optimizer: Optimizer, folder: Path) -> None:
    """Whole or not at all: a file that is being written has another name."""
    path = folder / _name(engine, optimizer)
    own = own_state(optimizer)
    for stale in folder.glob(path.name.rpartition("_of_")[0] + "_of_*.pt"):
        stale.unlink()
    if own is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(own, partial)
    os.replace(partial, path)


def _read_own(engine: Engine, optimizer: Optimizer, folder: Path) -> dict:
    """What this rank saved; empty if nothing was needed. ValueError for another number of ranks."""
    path = folder / _name(engine, optimizer)
    if path.is_file():
        return torch.load(path, map_location="cpu", weights_only=True)
    found = sorted(other.name for other in folder.glob("onebit_mp_rank_*_dp_rank_*.pt"))
    if found:
        raise ValueError(
            f"{folder} has no {path.name}, but {', '.join(found)}: either the file is lost, or the "
            "checkpoint was saved by another number of ranks, whose compression errors belong to "
            "them. Load it with as many ranks; before saving for another number call "
            "engine.basic_optimizer.synchronize() on all ranks"
        )
    return {}


# ---- what belongs to a rank


def own_state(optimizer: Optimizer) -> dict | None:
    """What of the optimizer's state only this rank has; None if all ranks have the same."""
    state = optimizer.state_dict()
    facts = internals.facts_of(state)
    if internals.same_on_all_ranks(facts):
        return None
    is_synced = internals.is_synced(facts)
    entries = {
        i: {name: x for name, x in entry.items() if not is_synced or name in internals.ERRORS}
        for i, entry in state["state"].items()
    }
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return {
        "facts": facts,
        "steps": optimizer.steps,
        "state": entries,
        "parameters": None if is_synced else parameters,
    }


def complete(optimizer: Optimizer, state_dict: dict) -> dict:
    """The state in DeepSpeed's file, which is another rank's, with this rank's own part."""
    own = optimizer.in_engine.pending
    if own is None:  # no engine is loading
        return state_dict
    if not own:
        _check_serves_all(internals.facts_of(state_dict))
        return state_dict
    steps = {float(entry["step"]) for entry in state_dict["state"].values()}
    if steps != {float(own["steps"])}:
        raise ValueError(
            f"this rank's file is of step {own['steps']}, DeepSpeed's of {sorted(steps)}: they "
            "belong to different saves. Load a checkpoint of another tag"
        )
    state = {i: entry | own["state"].get(i, {}) for i, entry in state_dict["state"].items()}
    return internals.with_facts(state_dict | {"state": state}, own["facts"])


def _check_serves_all(facts: dict) -> None:
    if facts and facts["size"] > 1 and not internals.same_on_all_ranks(facts):
        raise ValueError(
            f"this checkpoint holds the state of rank {facts['rank']} of {facts['size']} alone: it "
            "was saved without onebit.deepspeed.attach, so that the compression errors of the "
            "others are lost. To go on without any errors, load the model with "
            "engine.load_checkpoint(..., load_optimizer_states=False), and then the file's "
            'optimizer state, optimizer.load_state_dict(state["optimizer"], reset_errors=True)'
        )


@torch.no_grad()
def _take_parameters(engine: Engine, optimizer: Optimizer, own: dict) -> None:
    """Between two syncs each rank has parameters of its own."""
    if own.get("parameters") is None:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, saved in zip(params, own["parameters"]):
        p.copy_(saved)
    refresh_model(engine)
