"""gradient_clipping is the optimizer's: one factor, the same on all ranks and stages."""

import math
from typing import Any

import torch
import torch.distributed as dist

from onebit.deepspeed.half import is_half
from onebit.deepspeed.internals import Engine, Optimizer


def norm_of_engine(engine: Engine, optimizer: Optimizer) -> float | None:
    """The norm that the engine was told to clip to; None: none, or it is the optimizer's choice.

    DeepSpeed clips to 1.0 if its configuration does not say otherwise. `engine_config` leaves the
    option out, since `from_config` has read it; a max_grad_norm of the optimizer is a choice, too.
    """
    is_told = "gradient_clipping" in engine.config
    is_chosen = optimizer.max_grad_norm is not None or optimizer.in_engine.knows_clipping
    return engine.gradient_clipping() or None if is_told or not is_chosen else None


def model_parallel_size(engine: Engine) -> int:
    """On how many ranks the model is cut into stages or slices."""
    return engine.mpu.get_model_parallel_world_size() if engine.mpu is not None else 1


def take_over_clipping(engine: Engine, optimizer: Optimizer) -> None:
    """From now on the engine clips nothing. Its norm is the optimizer's max_grad_norm."""
    norm = norm_of_engine(engine, optimizer) or optimizer.max_grad_norm
    engine.clip_fp32_gradients = _nothing
    if is_half(engine):
        engine.optimizer.clip_grad = 0.0
    if norm and model_parallel_size(engine) > 1:
        optimizer.max_grad_norm = None
        optimizer.register_step_pre_hook(lambda *_: clip_over_stages(engine, optimizer, norm))
    else:
        optimizer.max_grad_norm = norm


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the engine would do with gradients is the optimizer's now."""


@torch.no_grad()
def clip_over_stages(engine: Engine, optimizer: Optimizer, norm: float) -> None:
    """Multiply all gradients by min(1, norm / (total + 1e-6)), one factor for all stages.

    total = sqrt(sum over the stages of mean_i ||g_i||^2): an upper bound of the averaged gradient's
    norm, in both phases. If it is not finite, all stages skip the step.
    """
    gradients = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    total = torch.zeros(1, dtype=torch.float64, device=engine.device)
    for g in gradients:
        total += g.double().square().sum()
    dist.all_reduce(total)
    total = math.sqrt(float(total) / optimizer.communicator.size)
    factor = min(1.0, norm / (total + 1e-6)) if math.isfinite(total) else math.nan
    if factor != 1:
        for g in gradients:
            g.mul_(factor)
