"""The state of the optimizers that DeepSpeed removed, as a state of those that take their place."""

import os

import torch

from onebit.deepspeed import internals
from onebit.deepspeed.groups import with_masks_of_this_run
from onebit.deepspeed.internals import Optimizer
from onebit.deepspeed.old_vectors import errors_of, own_facts, tensors_of
from onebit.optim import notices

OLD_KINDS = {"lamb_coeff_freeze": "OneBitLamb", "var_interval": "ZeroOneAdam"}
OPTIONS = ("lr", "betas", "eps", "weight_decay")


def load_state(optimizer: Optimizer, state: dict | str | os.PathLike) -> None:
    """Take over the state of DeepSpeed's OneBitAdam, ZeroOneAdam or OneBitLamb; training goes on.

    Momentum, variance, step and the groups' options are taken as they are. So are the compression
    errors that the file holds, which are those of the rank that saved it: they count as that rank's
    share of the mean. 0/1 Adam keeps its intervals and what it has accumulated since the last sync,
    1-bit LAMB its coefficients, ratios and scaling. One warning names what the file does not hold.

    Load the model's parameters first. All ranks load the same file. The phase follows from the
    step and the new optimizer's warm-up, so that it may also go back to the warm-up.

    Args:
        optimizer: onebit's optimizer of the same name.
        state: the old optimizer's state dict, DeepSpeed's fp16 wrapper's, a whole checkpoint file
            (mp_rank_00_model_states.pt), or the path of one.

    Raises ValueError, before anything has changed, if the state is another optimizer's.
    """
    whole = state if isinstance(state, dict) else _read(state)
    state = _innermost(whole)
    if not is_old(state):
        raise ValueError(
            "this is no state of the optimizers that DeepSpeed removed: load it with "
            "optimizer.load_state_dict"
        )
    _check_kind(optimizer, state)
    entries = [state["state"].get(i, {}) for g in state["param_groups"] for i in g["params"]]
    _check_sizes(optimizer, entries)
    new, lost = _translated(optimizer, entries, state["param_groups"])
    type(optimizer).load_state_dict(optimizer, with_masks_of_this_run(optimizer, new))
    if lost:
        notices.warn(f"of DeepSpeed's state is lost: {'; '.join(lost)}")


def is_old(state: dict) -> bool:
    """Whether this is a state dict of one of the removed optimizers."""
    groups = state.get("param_groups") or [{}]
    return "max_grad_norm" in groups[0] and "bias_correction" in groups[0]


def _read(path: str | os.PathLike) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def _innermost(state: dict) -> dict:
    """The optimizer's own state dict, from a file or from the wrapper for half precision."""
    for name in ("optimizer", "optimizer_state_dict"):
        if isinstance(state.get(name), dict):
            state = state[name]
    return state


def _check_kind(optimizer: Optimizer, state: dict) -> None:
    names = {name for entry in state["state"].values() for name in entry}
    kind = next((kind for name, kind in OLD_KINDS.items() if name in names), "OneBitAdam")
    if type(optimizer).__name__ != kind:
        raise ValueError(
            f"this is the state of DeepSpeed's {kind}, whose numbers mean something else to "
            f"{type(optimizer).__name__}: load it into onebit.{kind}"
        )


def _check_sizes(optimizer: Optimizer, entries: list[dict]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if len(params) != len(entries):
        raise ValueError(
            f"the state is of {len(entries)} parameters, the optimizer has {len(params)}: give it "
            "the same parameters, in the same order"
        )
    for i, (p, entry) in enumerate(zip(params, entries)):
        if entry and entry["exp_avg"].shape != p.shape:
            raise ValueError(
                f"the momentum of parameter {i} has shape {tuple(entry['exp_avg'].shape)}, the "
                f"parameter {tuple(p.shape)}: give the parameters in the order of the old script"
            )


def _translated(
    optimizer: Optimizer, entries: list[dict], groups: list[dict]
) -> tuple[dict, list[str]]:
    """(a state dict of `optimizer`'s, what was lost)."""
    template = optimizer.state_dict()
    new_groups = [
        own | {name: saved[name] for name in OPTIONS}
        for own, saved in zip(template["param_groups"], groups)
    ]
    owned = [
        (p, group) for own, group in zip(optimizer.param_groups, new_groups) for p in own["params"]
    ]
    tensors = [tensors_of(p, group, entry) for (p, group), entry in zip(owned, entries)]
    holds_errors, lost = errors_of(optimizer, owned, entries, tensors)
    steps = max((int(entry["step"]) for entry in entries if entry), default=0)
    state = {i: {"step": torch.tensor(float(steps))} | own for i, own in enumerate(tensors)}
    facts = internals.facts_of(template)
    facts |= own_facts(optimizer, new_groups, entries, steps, holds_errors)
    return internals.with_facts({"state": state, "param_groups": new_groups}, facts), lost
