"""DeepSpeed's engine leaves averaging, clipping and skipping to the optimizer."""

from typing import TYPE_CHECKING, Any

from onebit.deepspeed.checks import check, optimizer_of
from onebit.deepspeed.clipping import take_over_clipping
from onebit.deepspeed.each_rank import keep_each_rank
from onebit.deepspeed.half import is_half, step_in_half
from onebit.deepspeed.internals import Engine, Optimizer
from onebit.deepspeed.monitor import report
from onebit.deepspeed.prepare import prepare

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def attach(engine: "DeepSpeedEngine") -> "DeepSpeedEngine":
    """Leave averaging and clipping to the engine's optimizer; returns the engine.

    Call it once on every rank, right after deepspeed.initialize. From then on
    - the engine averages no gradients, neither at the end of an accumulation nor anywhere else;
    - gradient_clipping is the optimizer's max_grad_norm: one factor, the same on all ranks, of the
      averaged gradient in the warm-up and of its upper bound sqrt(mean_i ||g_i||^2) after it;
    - a gradient that is not finite on any rank skips the step on all ranks, and the engine knows;
    - fp16 scales the loss, and all ranks change the scale together;
    - save_checkpoint also writes what belongs to each rank, and load_checkpoint reads it;
    - the engine's monitor gets the optimizer's bytes, compression ratio and phase.

    Args:
        engine: what deepspeed.initialize returned, with an optimizer of onebit's. A pipeline engine
            is one too; each stage's optimizer works on the data-parallel group of the stage.

    Raises TypeError or ValueError, before anything has changed, for what cannot work: ZeRO,
    mixtures of experts, an optimizer on other ranks than the engine's, parameters that it lacks.
    """
    optimizer = optimizer_of(engine)
    held = getattr(optimizer, "in_engine", None)
    if held is not None and held.is_attached:
        return engine
    check(engine, optimizer)
    held = prepare(optimizer).in_engine
    if held.parameters_changed(optimizer):
        held.adopt(optimizer)
    stop_averaging(engine)
    take_over_clipping(engine, optimizer)
    if is_half(engine):
        step_in_half(engine, optimizer)
    else:
        optimizer.register_step_post_hook(_tell_skipped)
    keep_each_rank(engine, optimizer)
    report(engine, optimizer)
    held.is_attached = True
    return engine


def stop_averaging(engine: Engine) -> None:
    """For good: the switch is off, and what it switches does nothing, also when it is called."""
    engine.enable_backward_allreduce = False
    if hasattr(engine, "pipeline_enable_backward_allreduce"):
        engine.pipeline_enable_backward_allreduce = False
    engine.allreduce_gradients = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the engine would do with gradients is the optimizer's now."""


def _tell_skipped(optimizer: Optimizer, *step_arguments: Any) -> None:
    """The engine looks at `overflow`: a skipped step must not move the learning-rate schedule."""
    optimizer.overflow = optimizer.last_step_skipped
