"""Options checked before anything is lost: every refusal says the remedy."""

import inspect
from difflib import get_close_matches

import torch

# what the same thing is called elsewhere
SYNONYMS = {"freeze_step": "warmup", "warmup_steps": "warmup", "clip": "max_grad_norm", "max_norm": "max_grad_norm",
            "process_group": "communicator", "group": "communicator", "learning_rate": "lr", "decay": "weight_decay"}


def reject_unknown(given, valid, owner):
    """Raise TypeError if a name in `given` is not among the `valid` ones, with the nearest of them."""
    for name in [name for name in given if name not in valid]:
        near = get_close_matches(name, valid, n=1, cutoff=0.5)
        guess = SYNONYMS[name] if SYNONYMS.get(name) in valid else near[0] if near else None
        hint = f"did you mean '{guess}'?" if guess else f"it takes {', '.join(valid)}"
        raise TypeError(f"{owner} has no option '{name}': {hint}")


def option_names(constructor):
    """The keyword names that a constructor takes."""
    return [name for name, p in inspect.signature(constructor).parameters.items()
            if name not in ("self", "params") and p.kind is not p.VAR_KEYWORD]


def check_group(group):
    """Raise ValueError if a parameter group's options are out of range."""
    if not float(group["lr"]) >= 0:
        raise ValueError(f"lr must be at least 0, not {group['lr']}")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), not {group['betas']}")
    if not group["eps"] >= 0:
        raise ValueError(f"eps must be at least 0, not {group['eps']}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay must be at least 0, not {group['weight_decay']}")
    if not isinstance(group["compress"], bool):
        raise ValueError(f"compress must be True or False, not {group['compress']!r}")


def check_tensors(params):
    """Raise ValueError unless all parameters are dense floating-point tensors on one device."""
    for p in params:
        if not p.is_floating_point():
            raise ValueError(f"a parameter of {p.dtype} cannot be trained here: give floating-point parameters only")
    devices = {p.device for p in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"parameters lie on {names}: give each device its own optimizer, or move the model to one device")


def check_not_moved(params, device):
    """Raise RuntimeError if the model has moved since the optimizer made its state on `device`."""
    for p in params:
        if p.device != device:
            raise RuntimeError(f"parameters moved from {device} to {p.device} after the optimizer was made: move the model first, then make it")


def check_max_grad_norm(max_grad_norm):
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, or None for no clipping, not {max_grad_norm}")


def check_dense(params, names):
    """Raise ValueError if a gradient is sparse."""
    for p, name in zip(params, names):
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(f"the gradient of {name} is sparse, which cannot be compressed: use sparse=False in its nn.Embedding")
