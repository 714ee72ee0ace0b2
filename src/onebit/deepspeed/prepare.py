"""What an optimizer needs before deepspeed.initialize, which may change it unseen."""

import sys
import types

import torch

from onebit.deepspeed import each_rank, internals, old_state
from onebit.deepspeed.groups import mask_gradients, masked_groups, with_masks_of_this_run
from onebit.deepspeed.internals import Optimizer, rebuild


class InEngine:
    """What an optimizer knows of the engine that uses it.

    Attributes:
        is_attached: whether `attach` has been called.
        knows_clipping: whether max_grad_norm, None included, comes from the engine's configuration.
        pending: of the checkpoint that is being loaded, what belongs to this rank; else None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.is_attached = self.knows_clipping = False
        self.pending = None
        self._calls = 0  # of step() by an engine that is not attached
        self.remember(optimizer)

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        self._known = _places(optimizer)

    def parameters_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the engine has moved the parameters, or put float32 copies in their place."""
        now = _places(optimizer)
        return len(now) != len(self._known) or any(
            p is not q or where != before for (p, *where), (q, *before) in zip(now, self._known)
        )

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin anew with the parameters as the engine has left them."""
        if optimizer.steps:
            raise RuntimeError(
                "the optimizer had taken steps or loaded a state before deepspeed.initialize moved "
                "or converted its parameters: load the state after onebit.deepspeed.attach(engine)"
            )
        rebuild(optimizer)
        self.remember(optimizer)

    def check_attached(self) -> None:
        """Raise RuntimeError at the second step of an engine whose attach was forgotten."""
        if self.is_attached or not _called_by_engine():
            return
        self._calls += 1
        if self._calls > 1:
            raise RuntimeError(
                "DeepSpeed's engine calls step(), but onebit.deepspeed.attach(engine) was "
                "forgotten: the engine averages the gradients, and the optimizer averages them "
                "again. Call it once, right after deepspeed.initialize"
            )


def prepare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer of onebit ready for deepspeed.initialize; returns it. `from_config` has.

    Needed with fp16 and bf16, where the engine converts the model after the optimizer was made,
    puts float32 copies of the parameters into its groups, and tries step() once: the optimizer then
    begins anew with those, and takes no step. A forgotten `attach` raises at the second step.
    """
    if hasattr(optimizer, "in_engine"):
        return optimizer
    optimizer.in_engine = InEngine(optimizer)
    if masked_groups(optimizer):
        _check_masks_hold(optimizer)
        optimizer.register_step_pre_hook(mask_gradients)
    optimizer.step = types.MethodType(_step, optimizer)
    optimizer.load_state_dict = types.MethodType(_load_state_dict, optimizer)
    return optimizer


def check_unprepared(optimizer: Optimizer) -> None:
    """At a step of an optimizer that neither `prepare` nor `attach` has seen.

    Raises RuntimeError, when DeepSpeed's engine takes the step, if the engine has replaced or
    converted the parameters; without `attach`, the second step raises.
    """
    if not _called_by_engine():
        return
    if internals.has_foreign_parameters(optimizer):
        raise RuntimeError(
            "DeepSpeed has converted the optimizer's parameters, or put copies into their place, "
            "as it does with fp16, bf16 and ZeRO, and the optimizer does not know. With fp16 and "
            "bf16 give deepspeed.initialize an optimizer from onebit.deepspeed.from_config, or "
            "onebit.deepspeed.prepare(onebit.OneBitAdam(...)); ZeRO cannot go with it: set the "
            "stage to 0"
        )
    prepare(optimizer).in_engine.check_attached()


Optimizer._check_caller = check_unprepared  # type: ignore[assignment,method-assign]


def _step(self, closure=None):
    """As the optimizer's own, but for the step that DeepSpeed tries after it has converted."""
    held = self.in_engine
    if held.parameters_changed(self):
        held.adopt(self)
        return None
    held.check_attached()
    return type(self).step(self, closure)


def _load_state_dict(self, state_dict, **options):
    """As the optimizer's own; of an engine's checkpoint each rank takes its own part.

    A state of the removed optimizers is taken too, see `onebit.deepspeed.load_state`.
    """
    if old_state.is_old(state_dict):
        return old_state.load_state(self, state_dict)
    state_dict = each_rank.complete(self, state_dict)
    return type(self).load_state_dict(self, with_masks_of_this_run(self, state_dict), **options)


def _check_masks_hold(optimizer: Optimizer) -> None:
    if getattr(optimizer, "variance_floor", 0.0):
        raise ValueError(
            "exp_avg_mask and variance_floor contradict each other: a floor under the variance "
            "gives the masked coordinates a momentum again. Set one of them only"
        )


def _places(optimizer: torch.optim.Optimizer) -> list[tuple]:
    return [(p, p.device, p.dtype) for group in optimizer.param_groups for p in group["params"]]


def _called_by_engine() -> bool:
    """Whether one of the callers is DeepSpeed's: its engine, or its wrapper for half precision."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("deepspeed."):
            return True
        frame = frame.f_back
    return False
