"""Checks of options, parameters and gradients, before anything is lost: each says the remedy."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from math import inf, nan
from numbers import Integral, Real
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.compression import Compressor
from onebit.layout import Partition

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
# required options -> what they are, and how to choose them
REQUIRED = {
    "warmup": "the number of steps before the variance is frozen: 15 to 25 % of all steps is the "
    "papers' rule of thumb, and onebit.VarianceRatio(min_steps=...) chooses it",
    "variance_freeze_step": "the last step that may update the variance: usually the last step of "
    "the learning-rate warm-up; with math.inf every step may",
}
# what tells a parameter of which each rank holds a shard only: an attribute of it -> whose it is
SHARDED = {
    "placements": "a DTensor, as FSDP's fully_shard and tensor parallelism make them",
    "_fsdp_flattened": "FullyShardedDataParallel's",
    "ds_id": "sharded by DeepSpeed ZeRO-3",
}


ONLY_TRAINED = (
    "Frozen parameters never have a gradient: give only those with requires_grad=True, "
    "[p for p in model.parameters() if p.requires_grad]"
)


# ---- names of options


def check_option_names(owner: Any, given: Mapping[str, Any]) -> None:
    """Raise TypeError if a constructor's keyword is unknown or a required one is missing.

    Python's own TypeError would name the word, but not what it is called here or what to choose.
    """
    parameters = inspect.signature(owner.__init__).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    valid = option_names(owner)
    for name in [name for name in given if name not in (*valid, "params")]:
        raise TypeError(f"{owner.__name__} has no option '{name}': {_instead_of(name, valid)}")
    for name in [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]:
        if name in REQUIRED and given.get(name) is None:
            raise TypeError(f"{owner.__name__} needs {name}=, {REQUIRED[name]}")


def _instead_of(name: str, valid: Sequence[str]) -> str:
    if name in ONLY_TORCH:
        return "leave it out"
    near = nearest(name, valid, cutoff=0.5)
    return f"did you mean '{near}'?" if near else f"it takes {', '.join(valid)}"


def option_names(owner: Any) -> list[str]:
    """The keywords that a class's constructor takes, apart from the parameters."""
    parameters = inspect.signature(owner.__init__).parameters
    return [name for name in parameters if name not in ("self", "params")]


def check_group_keys(
    group: Any, of_a_group: Sequence[str], owner: type, given: Mapping[str, Any]
) -> None:
    """Raise TypeError if a parameter group has a key that nobody would read.

    That is one that looks like a group's option, or an option of the whole optimizer. Other keys
    are the user's own. Nothing is lost, and so nothing is wrong, if the constructor was `given`
    the option with the same value, as by wrappers that pass their own groups and keywords.
    """
    if not isinstance(group, dict):
        return
    for name in group:
        near = None if name in of_a_group else nearest(name, of_a_group, cutoff=0.8)
        if near and not name.startswith(f"{near}_"):
            raise TypeError(
                f"a parameter group of {owner.__name__} has no option '{name}': did you mean "
                f"'{near}'?"
            )
        is_lost = name not in given or not _equal(given[name], group[name])
        if name in option_names(owner) and name not in of_a_group and is_lost:
            raise TypeError(
                f"{name} is an option of {owner.__name__} as a whole, not of a parameter group: "
                "give it to the constructor only. If torch.distributed's ZeroRedundancyOptimizer "
                f"put it into the group, use {owner.__name__} without it: the compressed exchange "
                "needs every parameter on every rank, where ZeroRedundancyOptimizer gives each "
                "rank a part of them"
            )


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not torch.is_tensor(a) and bool(a == b))


def nearest(name: str, valid: Sequence[str], cutoff: float) -> str | None:
    """The valid name that was perhaps meant, or None."""
    if SYNONYMS.get(name) in valid:
        return SYNONYMS[name]
    return next(iter(get_close_matches(name, valid, n=1, cutoff=cutoff)), None)


# ---- values of options


def check_number(name: str, value: Any, low: float, strict: bool = False) -> None:
    """Raise ValueError unless `value` is a number, or a tensor of one, of at least `low`.

    Args:
        strict: whether it must be above `low`.
    """
    number: Any = (
        value
        if isinstance(value, Real) and not isinstance(value, bool)
        else value.item()
        if torch.is_tensor(value) and value.numel() == 1
        else nan
    )
    if not (number > low if strict else number >= low):
        raise ValueError(
            f"{name} must be a number {'above' if strict else 'of at least'} {low}, not {value!r}"
        )


def check_whole(name: str, value: Any, low: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `low`, or infinite."""
    if isinstance(value, bool) or not (isinstance(value, Integral) or value == inf) or value < low:
        raise ValueError(
            f"{name} must be a whole number of at least {low}, or math.inf, not {value!r}"
        )


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_group(group: Mapping[str, Any], names: Iterable[str]) -> None:
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


def check_betas(betas: Any) -> None:
    """Raise ValueError unless `betas` are two numbers in [0, 1)."""
    if (
        not isinstance(betas, (tuple, list))
        or len(betas) != 2
        or not all(isinstance(b, Real) and 0 <= float(b) < 1 for b in betas)
    ):
        raise ValueError(f"betas must be two numbers in [0, 1), not {betas!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number in [0, 1)."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be a number in [0, 1), not {value!r}")


def check_bounds(name: str, bounds: Any) -> None:
    """Raise ValueError unless `bounds` are two numbers, 0 < low <= high."""
    if (
        not isinstance(bounds, (tuple, list))
        or len(bounds) != 2
        or not all(isinstance(b, Real) for b in bounds)
        or not 0 < bounds[0] <= bounds[1]
    ):
        raise ValueError(
            f"{name} must be two numbers (low, high) with 0 < low <= high, not {bounds!r}; (1, 1) "
            "switches it off"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_compressor(
    compressor: Any, partition: Partition, dtype: torch.dtype, name: str = "compressor"
) -> None:
    """Raise TypeError unless `compressor` makes a Compressor of this partition.

    Called when the parameters are laid out, so that a mistake does not wait for the freeze.
    """
    if not callable(compressor) or not isinstance(compressor(partition, dtype), Compressor):
        raise TypeError(
            f"{name} must be a class such as onebit.compression.Sign, or a callable "
            f"(partition, dtype) -> Compressor, not {compressor!r}"
        )


def describe_option(value: Any) -> str:
    """An option as text, the same on ranks that have the same."""
    if isinstance(value, partial):
        return f"{describe_option(value.func)}{value.args}{value.keywords}"
    if isinstance(value, type):
        return value.__qualname__
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(tuple(value) if isinstance(value, list) else value)


def check_communicator(communicator: Any) -> None:
    """Raise TypeError unless `communicator` is one."""
    if not isinstance(communicator, Communicator):
        raise TypeError(
            "communicator must be a onebit.comm.Communicator, such as "
            f"onebit.comm.TorchDistributed(group), not {communicator!r}"
        )


# ---- parameters and gradients


def check_tensors(params: Sequence[torch.nn.Parameter]) -> None:
    """Raise ValueError unless the parameters are different, whole, dense floating-point tensors
    on one device."""
    if not params:
        raise ValueError("there is no parameter to train")
    for p in params:
        _check_whole_tensor(p)
        if not p.is_floating_point():
            raise ValueError(
                f"a parameter of {p.dtype} cannot be trained here: give floating-point parameters "
                f"only. {ONLY_TRAINED if not p.requires_grad else ''}".rstrip()
            )
    if len(set(params)) < len(params):
        raise ValueError(
            "the same parameter was given more than once, and would be updated as often in every "
            "step: give each parameter once, as model.parameters() does"
        )
    devices = {p.device for p in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"parameters lie on {names}: give each device its own optimizer, or move the model to "
            f"one device. {'' if all(p.requires_grad for p in params) else ONLY_TRAINED}".rstrip()
        )


def _check_whole_tensor(p: torch.nn.Parameter) -> None:
    for attribute, owner in SHARDED.items():
        if hasattr(p, attribute):
            raise ValueError(
                f"a parameter is {owner}: each rank holds only a shard of it, and of its gradient, "
                "so that there is no vector that all ranks have and whose signs could be averaged. "
                "Keep the whole model on every rank, plain or in DistributedDataParallel (see "
                "onebit.ddp.attach), or train the sharded model with another optimizer"
            )


def check_unchanged(
    params: Iterable[torch.nn.Parameter],
    shapes: Iterable[Sequence[int]],
    dtypes: Iterable[torch.dtype],
    device: torch.device,
) -> None:
    """Raise RuntimeError if parameters have moved, or changed their type or shape, since the
    optimizer made its state, or if a gradient has not its parameter's shape and device."""
    for p, shape, dtype in zip(params, shapes, dtypes):
        if (p.device, p.dtype) != (device, dtype):
            raise RuntimeError(
                f"parameters went from {dtype} on {device} to {p.dtype} on {p.device} after the "
                "optimizer was made: move and convert the model first, then make it"
            )
        if p.shape != shape or _lacks_memory(p):
            raise RuntimeError(
                f"a parameter went from shape {tuple(shape)} to {tuple(p.shape)}, or lost its "
                "memory, after the optimizer was made: make a new optimizer for the new parameters"
            )
        g = p.grad
        if g is not None and (g.shape != shape or g.device != device or _lacks_memory(g)):
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(shape)} on {device} has shape "
                f"{tuple(g.shape)} on {g.device}: set it to None, and compute it anew"
            )


def _lacks_memory(x: torch.Tensor) -> bool:
    """Whether a dense tensor's storage has become smaller than the tensor."""
    return (
        x.layout == torch.strided
        and x.is_contiguous()
        and (x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.itemsize)
    )


def has_sparse_gradient(p: torch.nn.Parameter) -> bool:
    """Whether the gradient of p is sparse."""
    return p.grad is not None and p.grad.layout != torch.strided


def check_dense(params: Iterable[torch.nn.Parameter], names: Iterable[str]) -> None:
    """Raise ValueError if a gradient is sparse."""
    for p, name in zip(params, names):
        if has_sparse_gradient(p):
            raise ValueError(
                f"the gradient of {name} is sparse, which cannot be compressed: use sparse=False "
                "in its nn.Embedding"
            )
