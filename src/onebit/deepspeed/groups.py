"""Parameter groups as scripts for the old optimizers write them, with masks of the momentum."""

from collections.abc import Iterable
from typing import Any

import torch

from onebit.deepspeed.internals import Optimizer
from onebit.deepspeed.options import Block

MASK = "exp_avg_mask"


def translate_groups(params: Iterable, block: Block) -> list:
    """The parameters in the form that the optimizers here take.

    `non_freeze`: True, a group that the old 1-bit Adam averaged exactly, becomes compress=False.
    Raises ValueError for an option that a group cannot have here, and for a mask of another shape.
    """
    params = list(params)
    if not params or not isinstance(params[0], dict):
        return params
    return [_translate_group(dict(group), block) for group in params]


def _translate_group(group: dict, block: Block) -> dict:
    for name in group:
        if name in block.names and name not in ("lr", "betas", "eps", "weight_decay"):
            raise ValueError(
                f"a parameter group has {name}, which is an option of the whole optimizer here: "
                "write it into the optimizer block"
            )
    if group.pop("non_freeze", False):
        group["compress"] = False
    if MASK in group:
        group["params"] = [group["params"]] if torch.is_tensor(group["params"]) else group["params"]
        group["params"] = list(group["params"])
        _check_mask(group[MASK], group["params"])
    return group


def _check_mask(mask: Any, params: Iterable) -> None:
    if not torch.is_tensor(mask) or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{MASK} must be a tensor of zeros and ones")
    for p in params:
        if p.shape != mask.shape:
            raise ValueError(
                f"{MASK} has shape {tuple(mask.shape)} and a parameter of its group "
                f"{tuple(p.shape)}: give each parameter with a mask a group of its own"
            )


def masked_groups(optimizer: Optimizer) -> list[tuple[dict, torch.Tensor]]:
    """The groups that have a mask, with it."""
    return [(group, group[MASK]) for group in optimizer.param_groups if MASK in group]


def mask_gradients(optimizer: Optimizer, *step_arguments: Any) -> None:
    """A hook before each step: g <- mask g.

    A coordinate without gradient has neither momentum nor variance, and one without variance takes
    no part in the compression: so its momentum is 0 in both phases, and its parameter stays (but
    for weight decay).
    """
    for group, mask in masked_groups(optimizer):
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(mask.to(p.grad))


def with_masks_of_this_run(optimizer: Optimizer, state_dict: dict) -> dict:
    """A state with this run's masks, whatever was saved: m, v and errors are 0 where they are."""
    groups = [
        {name: value for name, value in group.items() if name != MASK}
        for group in state_dict["param_groups"]
    ]
    state = dict(state_dict["state"])
    for saved, group in zip(groups, optimizer.param_groups):
        if MASK in group:
            for i in saved["params"]:
                state[i] = _masked(state.get(i, {}), group[MASK])
    return state_dict | {"state": state, "param_groups": groups}


def _masked(entries: dict, mask: torch.Tensor) -> dict:
    return {
        name: value * mask.to(value)
        if torch.is_tensor(value) and value.shape == mask.shape
        else value
        for name, value in entries.items()
    }
