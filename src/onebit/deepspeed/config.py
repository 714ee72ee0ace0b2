"""An old DeepSpeed configuration: the optimizer it asks for, and what the engine still takes."""

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.comm.base import launched_processes
from onebit.deepspeed.groups import translate_groups
from onebit.deepspeed.options import Block, block_of, check_not_auto, say, translate
from onebit.deepspeed.prepare import prepare

# What attach takes over, or what concerned the engine's own averaging of gradients.
TAKEN_OVER = (
    "optimizer",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "communication_data_type",
    "fp32_allreduce",
)
DEFAULT_CLIPPING = 1.0
AVERAGING = TAKEN_OVER[2:]


def from_config(
    config: dict | str | os.PathLike,
    params: Iterable,
    *,
    communicator: Communicator | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """The optimizer that an old configuration asks for, ready to be given to deepspeed.initialize.

    It trains as DeepSpeed's did: without bias correction unless the block asks for it, with the
    block's defaults of the old optimizer. docs/from_deepspeed.md says what each option is here.

    If no process group exists yet, although a launcher has started several processes, it is
    initialised as deepspeed.initialize would do it.

    Args:
        config: a whole configuration, or its optimizer block: a dict, or the path of a JSON file.
        params: parameters, named parameters, or groups. A group may have `exp_avg_mask`, a 0/1
            tensor of its parameters' shape: the momentum stays 0 where it is 0. The mask is that
            of this run, whatever a checkpoint says.
        communicator: see `onebit.comm`; None: all ranks. A pipeline needs
            onebit.comm.TorchDistributed(model.mpu().get_data_parallel_group()).
        options: what overrides or completes the file, under the names here, such as warmup=2000.

    Raises ValueError for what cannot be honoured, and names it and the nearest right option.
    """
    config = read(config)
    whole = config if "optimizer" in config or "type" not in config else None
    block_dict: Any = _optimizer_block(config)
    block = block_of(block_dict.get("type"))
    check_engine_options(whole or {})
    given = {name: value for name, value in (block_dict.get("params") or {}).items()}
    _drop_overridden(block, given, options)
    max_grad_norm = _max_grad_norm(whole, given, options)
    translated = translate(block, given) | {"max_grad_norm": max_grad_norm} | options
    _say_averaging(whole or {})
    _initialize_process_group(communicator)
    optimizer = block.optimizer(
        translate_groups(params, block), **translated, communicator=communicator
    )
    prepare(optimizer).in_engine.knows_clipping = whole is not None
    return optimizer


def engine_config(config: dict | str | os.PathLike) -> dict:
    """What of an old configuration is left for the engine, once the optimizer does the averaging.

    A copy of it without the optimizer block, and without what `attach` takes over. It names ZeRO
    stage 0, since Accelerate wants the stage in the file. Raises ValueError for what cannot be had
    with these optimizers, such as another stage.
    """
    config = read(config)
    check_engine_options(config)
    left = {name: copy.deepcopy(value) for name, value in config.items() if name not in TAKEN_OVER}
    return {"zero_optimization": {"stage": 0}} | left


def read(config: dict | str | os.PathLike) -> dict:
    """A configuration as a dict; a file must be JSON without repeated keys."""
    if isinstance(config, dict):
        return config
    path = Path(config)
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"the configuration {path} cannot be read: {error}") from error
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a configuration")
    return found


def _without_repeats(pairs: list[tuple]) -> dict:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"the configuration has {', '.join(repeated)} more than once: keep one")
    return dict(pairs)


def _optimizer_block(config: dict) -> dict:
    if "optimizer" in config:
        return config["optimizer"]
    if "type" in config:
        return config
    raise ValueError(
        "the configuration has no optimizer block: it needs "
        '{"optimizer": {"type": "OneBitAdam", "params": {...}}}; or make an optimizer of onebit '
        "yourself, onebit.OneBitAdam(...), and pass it through onebit.deepspeed.prepare"
    )


def _drop_overridden(block: Block, given: dict, options: dict) -> None:
    """An option given to from_config replaces the file's, "auto" included."""
    names = {**block.renamed, block.freeze[0]: block.freeze[1]}
    for name in [name for name in given if names.get(name, name) in options]:
        del given[name]
    if block.freeze[1] in options:
        given[block.freeze[0]] = 1  # is overridden below


def check_engine_options(config: dict) -> None:
    """Raise ValueError for options of the engine that these optimizers cannot go with."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else int(zero)
    if stage not in (0, None):
        raise ValueError(zero_refusal(f"zero_optimization.stage is {stage}"))
    if config.get("sparse_gradients"):
        raise ValueError(
            "sparse_gradients: a sparse gradient has no signs to send where it is empty: set it to "
            "false, and sparse=False in nn.Embedding"
        )
    if config.get("gradient_allreduce_op", "mean") != "mean":
        raise ValueError(
            f"gradient_allreduce_op is {config['gradient_allreduce_op']!r}: the optimizer averages "
            'the gradients. Set it to "mean", and multiply the loss by the number of ranks if you '
            "need their sum"
        )


def zero_refusal(found: str) -> str:
    """Why ZeRO is refused, and what to use instead."""
    return (
        f"{found}: with ZeRO each rank holds only a shard of the optimizer state, so that there is "
        "no momentum that all ranks have and whose signs could be averaged; the removed optimizers "
        "refused it too. Set the stage to 0. The memory that 1-bit Adam itself needs after the "
        "freeze is about Adam's (docs/from_deepspeed.md); if the model does not fit without "
        "sharding, use DeepSpeed's own Adam with ZeRO"
    )


def _max_grad_norm(config: dict | None, given: dict, options: dict) -> float | None:
    """The clipping norm: gradient_clipping, or max_grad_norm of the block; 0 is none."""
    if "max_grad_norm" in options:
        given.pop("max_grad_norm", None)
        return options["max_grad_norm"]
    clipping = _gradient_clipping(config)
    in_block = given.get("max_grad_norm") or 0.0
    check_not_auto("gradient_clipping", clipping)
    check_not_auto("optimizer.params.max_grad_norm", in_block)
    if in_block and clipping not in (0.0, in_block) and "gradient_clipping" in (config or {}):
        raise ValueError(
            f"gradient_clipping is {clipping} and optimizer.params.max_grad_norm {in_block}: keep "
            "one of them"
        )
    if in_block:
        say(
            f"max_grad_norm={in_block} in the optimizer block clips here, while the old optimizers "
            "never used it: remove it for the old behaviour, or write gradient_clipping instead"
        )
    return in_block or clipping or None


def _say_averaging(config: dict) -> None:
    named = [
        name
        for name in AVERAGING
        if config.get(name) not in (None, False) and (name, config[name]) != _NEUTRAL
    ]
    if named:
        say(
            f"{', '.join(named)}: dropped, the engine no longer averages gradients. The optimizer "
            "sends them in their own type, and divides float16 before it adds"
        )


def _gradient_clipping(config: dict | None) -> float:
    """DeepSpeed clips to 1.0 unless the configuration says otherwise; a block says nothing."""
    if config is None:
        return 0.0
    if "gradient_clipping" not in config:
        say(
            f"gradient_clipping is missing: as in DeepSpeed gradients are clipped to "
            f"{DEFAULT_CLIPPING}. Set it, to 0 for no clipping"
        )
    return config.get("gradient_clipping", DEFAULT_CLIPPING) or 0.0


_NEUTRAL = ("gradient_predivide_factor", 1.0)


def _initialize_process_group(communicator: Communicator | None) -> None:
    """Do now what deepspeed.initialize would do a moment later, since the optimizer needs it."""
    if communicator is not None or torch.distributed.is_initialized() or not launched_processes():
        return
    import deepspeed

    deepspeed.init_distributed()
