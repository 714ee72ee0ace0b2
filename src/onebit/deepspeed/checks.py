"""What an engine must be like before `attach` changes anything; every refusal says what to do."""

from typing import Any

import torch.distributed as dist

from onebit.comm import TorchDistributed
from onebit.deepspeed.config import zero_refusal
from onebit.deepspeed.half import is_half
from onebit.deepspeed.internals import Engine, Optimizer


def optimizer_of(engine: Engine) -> Optimizer:
    """The engine's optimizer, without DeepSpeed's wrapper. TypeError if it is not onebit's."""
    import deepspeed

    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise TypeError(
            "attach takes the engine that deepspeed.initialize returns, not "
            f"{type(engine).__name__}"
        )
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the engine's optimizer is {type(optimizer).__name__}, not one of onebit's: give "
            "deepspeed.initialize optimizer=onebit.deepspeed.from_config(config, params), and a "
            "configuration without an optimizer block, onebit.deepspeed.engine_config(config)"
        )
    return optimizer


def check(engine: Engine, optimizer: Optimizer) -> None:
    """Raise ValueError if the two cannot work together, before anything has changed."""
    _check_engine(engine)
    _check_wrapper(engine, optimizer)
    _check_optimizer(engine, optimizer)
    _check_ranks(engine, optimizer)
    _check_parameters(engine, optimizer)
    _check_tied_weights(engine, optimizer)


def _check_engine(engine: Engine) -> None:
    if engine.zero_optimization_stage() > 0:
        stage = int(engine.zero_optimization_stage())
        raise ValueError(zero_refusal(f"the engine runs ZeRO stage {stage}"))
    if engine.has_moe_layers:
        raise ValueError(
            "the model has layers with experts (MoE): each rank holds experts of its own, so that "
            "their gradients have no average over all ranks. The removed optimizers could not do "
            "it either: use DeepSpeed's own Adam"
        )
    if not engine.gradient_average:
        raise ValueError(
            'gradient_allreduce_op is "sum", and the optimizer averages: set it to "mean", and '
            "multiply the loss by the number of ranks if you need the sum"
        )


def _check_wrapper(engine: Engine, optimizer: Optimizer) -> None:
    if engine.optimizer is not optimizer and not is_half(engine):
        raise ValueError(
            f"DeepSpeed has wrapped the optimizer in {type(engine.optimizer).__name__}, which cuts "
            "its state into shards: use fp16 or float32 instead of bf16 in a pipeline"
        )
    if is_half(engine) and not hasattr(optimizer, "in_engine"):
        raise ValueError(
            "the engine has put float32 copies of the parameters into the optimizer's groups, and "
            "the optimizer does not know: give deepspeed.initialize an optimizer from "
            "onebit.deepspeed.from_config, or onebit.deepspeed.prepare(onebit.OneBitAdam(...))"
        )


def _check_optimizer(engine: Engine, optimizer: Optimizer) -> None:
    if optimizer.overlap:
        raise ValueError(
            "overlap=True sends buckets during backward, before the engine knows whether the "
            "accumulation of gradients is complete: make the optimizer with overlap=False"
        )
    if is_half(engine) and not optimizer.check_finite:
        raise ValueError(
            "check_finite=False, but half precision needs all ranks to skip a step together: make "
            "the optimizer with check_finite=True"
        )
    own = optimizer.max_grad_norm
    if "gradient_clipping" in engine.config and own not in (None, engine.gradient_clipping()):
        raise ValueError(
            f"gradient_clipping is {engine.gradient_clipping()} and the optimizer's max_grad_norm "
            f"{own}: keep one of them"
        )


def data_parallel_group(engine: Engine) -> dist.ProcessGroup | None:
    """The ranks that hold the same parameters as this one; None: all."""
    return engine.mpu.get_data_parallel_group() if engine.mpu is not None else None


def _check_ranks(engine: Engine, optimizer: Optimizer) -> None:
    """Both must average over the same processes."""
    communicator = optimizer.communicator
    group = data_parallel_group(engine)
    if isinstance(communicator, TorchDistributed):
        theirs, ours = (
            dist.get_process_group_ranks(g or dist.group.WORLD) for g in (group, communicator.group)
        )
    else:
        theirs = (dist.get_rank(group), dist.get_world_size(group))
        ours = (communicator.rank, communicator.size)
    if theirs != ours:
        raise ValueError(
            f"the engine's data-parallel group has ranks {theirs}, the optimizer's communicator "
            f"{ours}: make the optimizer with communicator=onebit.comm.TorchDistributed("
            "model.mpu().get_data_parallel_group()), and after the process group exists"
        )


def _check_parameters(engine: Engine, optimizer: Optimizer) -> None:
    known = {id(p) for group in _trained_groups(engine, optimizer) for p in group}
    for name, p in engine.module.named_parameters():
        if p.requires_grad and id(p) not in known:
            raise ValueError(
                f"the optimizer does not have {name}, whose gradient nobody would average: give it "
                "all parameters of the model, or set its requires_grad to False"
            )


def _trained_groups(engine: Engine, optimizer: Optimizer) -> list:
    """The model's own parameters by group: with half precision the optimizer has copies of them."""
    if is_half(engine):
        return engine.optimizer.fp16_groups
    return [group["params"] for group in optimizer.param_groups]


def _check_tied_weights(engine: Engine, optimizer: Optimizer) -> None:
    """Copies of a tied weight on two stages stay equal only if their averages are exact."""
    weights: Any = getattr(engine.module, "get_tied_weights_and_groups", list)()
    tied = {id(weight) for weight, _ in weights}
    pairs = zip(_trained_groups(engine, optimizer), optimizer.param_groups)
    if any(id(p) in tied and group["compress"] for params, group in pairs for p in params):
        raise ValueError(
            "the pipeline ties a weight over several stages, whose copies would drift apart, since "
            "each stage compresses its own: put it into a parameter group with compress=False on "
            "all of them"
        )
