"""Options checked before anything is lost: every refusal says the remedy."""

import inspect
from difflib import get_close_matches
from functools import partial
from math import inf, nan
from numbers import Integral, Real

import torch

from onebit.comm import Communicator
from onebit.compression import Compressor
from onebit.layout import Layout

FRACTIONS = ("momentum", "dampening")  # options of a group in [0, 1)
# what the same thing is called elsewhere
SYNONYMS = {
    "freeze_step": "warmup",
    "warmup_steps": "warmup",
    "clip": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "process_group": "communicator",
    "group": "communicator",
    "learning_rate": "lr",
    "decay": "weight_decay",
}
# options of torch.optim.Adam, AdamW and SGD that have no counterpart here
ONLY_TORCH = (
    "amsgrad",
    "nesterov",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)

# what tells a parameter of which each rank holds a shard only: an attribute of it -> whose it is
SHARDED = {
    "placements": "a DTensor, as FSDP's fully_shard and tensor parallelism make them",
    "_fsdp_flattened": "FullyShardedDataParallel's",
    "ds_id": "sharded by DeepSpeed ZeRO-3",
}


def reject_unknown(given, valid, owner):
    """Raise TypeError if a name in `given` is not among the `valid` ones, with the nearest of them."""
    for name in [name for name in given if name not in valid]:
        near = nearest(name, valid, cutoff=0.5)
        hint = (
            "leave it out"
            if name in ONLY_TORCH
            else f"did you mean '{near}'?"
            if near
            else f"it takes {', '.join(valid)}"
        )
        raise TypeError(f"{owner} has no option '{name}': {hint}")


def reject_misspelt(group, valid, owner):
    """Raise TypeError if a parameter group has a key that looks like one of the `valid` options; other keys are the user's own."""
    for name in group:
        near = None if name in valid else nearest(name, valid, cutoff=0.8)
        if near and not name.startswith(f"{near}_"):
            raise TypeError(
                f"a parameter group of {owner} has no option '{name}': did you mean '{near}'?"
            )


def reject_not_of_a_group(group, valid, of_all, owner):
    """Raise TypeError if a parameter group has an option that only the whole optimizer has: nobody would read it there."""
    for name in group:
        if name in of_all and name not in valid:
            raise TypeError(
                f"{name} is an option of {owner} as a whole, not of a parameter group: give it to the constructor"
            )


def nearest(name, valid, cutoff):
    """The valid name that was perhaps meant, or None."""
    if SYNONYMS.get(name) in valid:
        return SYNONYMS[name]
    return next(iter(get_close_matches(name, valid, n=1, cutoff=cutoff)), None)


def option_names(constructor):
    """The keyword names that a constructor takes."""
    return [
        name
        for name, p in inspect.signature(constructor).parameters.items()
        if name not in ("self", "params") and p.kind is not p.VAR_KEYWORD
    ]


def check_number(name, value, low, strict=False):
    """Raise ValueError unless `value` is a number, or a tensor of one, of at least (strict: above) `low`."""
    number = (
        value
        if isinstance(value, Real) and not isinstance(value, bool)
        else value.item()
        if torch.is_tensor(value)
        else nan
    )
    if not (number > low if strict else number >= low):
        raise ValueError(
            f"{name} must be a number {'above' if strict else 'of at least'} {low}, not {value!r}"
        )


def check_whole(name, value, low):
    """Raise ValueError unless `value` is a whole number of at least `low`, or infinite."""
    if isinstance(value, bool) or not (isinstance(value, Integral) or value == inf) or value < low:
        raise ValueError(
            f"{name} must be a whole number of at least {low}, or math.inf, not {value!r}"
        )


def check_flag(name, value):
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_group(group, names):
    """Raise ValueError if one of these options of a parameter group is out of range."""
    for name in names:
        if name == "compress":
            check_flag(name, group[name])
        elif name == "betas":
            check_betas(group[name])
        elif name in FRACTIONS:
            check_fraction(name, group[name])
        else:
            check_number(name, group[name], 0)


def check_betas(betas):
    if (
        not isinstance(betas, (tuple, list))
        or len(betas) != 2
        or not all(isinstance(b, Real) and 0 <= b < 1 for b in betas)
    ):
        raise ValueError(f"betas must be two numbers in [0, 1), not {betas!r}")


def check_fraction(name, value):
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), not {value!r}")


def check_bounds(name, bounds):
    """Raise ValueError unless `bounds` are two numbers, 0 < low <= high."""
    if (
        not isinstance(bounds, (tuple, list))
        or len(bounds) != 2
        or not all(isinstance(b, Real) for b in bounds)
        or not 0 < bounds[0] <= bounds[1]
    ):
        raise ValueError(
            f"{name} must be two numbers (low, high) with 0 < low <= high, not {bounds!r}; (1, 1) switches it off"
        )


def check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_compressor(compressor, name="compressor"):
    """The compressor, if it can make one, its own options being right; raises TypeError else. It is tried here, not at the freeze."""
    if not callable(compressor) or not isinstance(
        compressor(Layout([(1,)], ranks=1).worker_partition(), torch.float32), Compressor
    ):
        raise TypeError(
            f"{name} must be a class such as onebit.compression.Sign, or a callable (partition, dtype) -> Compressor, not "
            f"{compressor!r}"
        )
    return compressor


def describe_compressor(compressor):
    """Text that is the same on ranks that compress alike."""
    if isinstance(compressor, partial):
        return f"{describe_compressor(compressor.func)}{compressor.args}{compressor.keywords}"
    return getattr(compressor, "__qualname__", type(compressor).__qualname__)


def check_communicator(communicator):
    if not isinstance(communicator, Communicator):
        raise TypeError(
            f"communicator must be a onebit.comm.Communicator, such as onebit.comm.TorchDistributed(group), not {communicator!r}"
        )


def check_tensors(params):
    """Raise ValueError unless all parameters are whole, dense floating-point tensors on one device."""
    for p in params:
        check_whole_tensor(p)
        if not p.is_floating_point():
            raise ValueError(
                f"a parameter of {p.dtype} cannot be trained here: give floating-point parameters only"
            )
    devices = {p.device for p in params}
    if not params:
        raise ValueError("there is no parameter to train")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"parameters lie on {names}: give each device its own optimizer, or move the model to one device"
        )


def check_whole_tensor(p):
    for attribute, owner in SHARDED.items():
        if hasattr(p, attribute):
            raise ValueError(
                f"a parameter is {owner}: each rank holds only a shard of it, and of its gradient, so that there is no vector that all "
                "ranks have and whose signs could be averaged. Keep the whole model on every rank, plain or in "
                "DistributedDataParallel (see onebit.ddp.attach), or train the sharded model with another optimizer"
            )


def check_not_moved(params, device, dtypes):
    """Raise RuntimeError if the model has moved, or changed its type, since the optimizer made its state."""
    for p, dtype in zip(params, dtypes):
        if (p.device, p.dtype) != (device, dtype):
            raise RuntimeError(
                f"parameters went from {dtype} on {device} to {p.dtype} on {p.device} after the optimizer was made: move and convert "
                "the model first, then make it"
            )


def has_sparse_gradient(p):
    return p.grad is not None and p.grad.layout != torch.strided


def check_dense(params, names):
    """Raise ValueError if a gradient is sparse."""
    for p, name in zip(params, names):
        if has_sparse_gradient(p):
            raise ValueError(
                f"the gradient of {name} is sparse, which cannot be compressed: use sparse=False in its nn.Embedding"
            )


def check_may_step(optimizer):
    """Raise RuntimeError if step() is called by a GradScaler, and gradients have left with the scale still in them."""
    if optimizer.overlap and hasattr(optimizer, "found_inf"):  # set by torch's GradScaler
        raise RuntimeError(
            "with overlap=True a bucket leaves during backward, when this rank's scale is still in it and torch.amp.GradScaler has "
            "not yet looked at it: make the optimizer with overlap=False, or use bfloat16, which needs no scaler"
        )
