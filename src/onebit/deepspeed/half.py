"""fp16 and bf16: DeepSpeed keeps float32 copies of the parameters, which the optimizer trains."""

import types
from typing import Any

import torch

from onebit.deepspeed.internals import Engine, Optimizer


def is_half(engine: Engine) -> bool:
    """Whether the engine's optimizer is DeepSpeed's wrapper with one float32 copy per parameter."""
    return hasattr(engine.optimizer, "fp16_groups") and hasattr(engine.optimizer, "fp32_groups")


def step_in_half(engine: Engine, optimizer: Optimizer) -> None:
    """Let the wrapper's step agree over all ranks, and its loss scale be applied.

    DeepSpeed's own step decides to skip by this rank's norm as well, so that one rank could leave
    the others waiting; it clips by this rank's norm; and without ZeRO it divides by the loss scale
    although nothing has multiplied by it.
    """
    wrapper = engine.optimizer
    scales_loss = wrapper.loss_scale_config.use_grad_scaling and _scale_loss(engine, wrapper)

    def step(self, closure=None):
        """One step of the copies, or none on any rank if a gradient on any is not finite."""
        self.overflow = self.overflow_checker.check()  # over all ranks
        if not self.overflow:
            _give_gradients(self, self.loss_scale if scales_loss else 1.0)
            optimizer.step()
            self.overflow = optimizer.last_step_skipped
            _take_parameters(self)
        self._update_scale(self.overflow)
        return self.overflow

    wrapper.step = types.MethodType(step, wrapper)


def _scale_loss(engine: Engine, wrapper: Any) -> bool:
    """Multiply the loss by the scale before backward; returns False where the engine gives no way.

    A pipeline engine runs backward by itself, so that no scale is applied, nor divided by.
    """
    if hasattr(engine, "pipeline_enable_backward_allreduce"):
        return False
    backward = engine.backward

    def scaled_backward(loss, *args, **kwargs):
        return backward(loss.float() * wrapper.loss_scale, *args, **kwargs) / wrapper.loss_scale

    engine.backward = scaled_backward
    return True


def _pairs(wrapper):
    """(float32 copy, parameter of the model) for each trained parameter."""
    for copies, params in zip(wrapper.fp32_groups, wrapper.fp16_groups):
        yield from zip(copies, params)


def _give_gradients(wrapper: Any, scale: float) -> None:
    """The copies' gradients: those of the model in float32, without the loss scale."""
    for copy, p in _pairs(wrapper):
        copy.grad = None if p.grad is None else p.grad.float().div_(scale)


@torch.no_grad()
def _take_parameters(wrapper: Any) -> None:
    """The model's parameters: the copies, rounded. The copies' gradients are dropped."""
    for copy, p in _pairs(wrapper):
        p.copy_(copy)
        copy.grad = None


def refresh_model(engine: Engine) -> None:
    """After the copies were loaded: the model's parameters are the copies, rounded."""
    if is_half(engine):
        _take_parameters(engine.optimizer)
