"""What changes during a run: the learning rate, and the phases with their sequence lengths."""

from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LinearThenDecay:
    """The learning rate of the 1-bit Adam paper's BERT runs.

    It rises linearly to `peak` in the first `warmup` steps, then falls by `decay` in each `every`.

        lr(s) = peak * s / warmup                          s <= warmup
                peak * decay^((s - warmup) / every)        else

    The decay is continuous, as in the authors' scripts. A run that is `stretch` times shorter
    follows the same curve faster: its step t, counted from 1, stands for step s = stretch * t.
    """

    peak: float
    warmup: int
    decay: float
    every: int
    stretch: float = 1

    def __post_init__(self):
        _require_positive(self)

    def __call__(self, steps_done: int) -> float:
        """The learning rate of the step after `steps_done`."""
        s = self.stretch * (steps_done + 1)
        return self.peak * (
            min(1, s / self.warmup)
            if s <= self.warmup
            else self.decay ** ((s - self.warmup) / self.every)
        )


@dataclass(frozen=True)
class StepDecay:
    """The learning rate of the paper's ResNet runs: `peak`, times `factor` every `every` steps.

        lr = peak * factor^floor(s / every)        s = stretch * (steps done before)

    In a run that is `stretch` times shorter, the rate falls every `every / stretch` steps.
    """

    peak: float
    factor: float
    every: int
    stretch: float = 1

    def __post_init__(self):
        _require_positive(self)

    def __call__(self, steps_done: int) -> float:
        """The learning rate of the step after `steps_done`."""
        return self.peak * self.factor ** (self.stretch * steps_done // self.every)


@dataclass(frozen=True)
class QuadraticThenDecay:
    """The learning rate of the 1-bit LAMB paper's BERT runs.

    It rises from a floor with the square of the step to `peak`, then falls towards the floor.

        lr(s) = peak * (floor + (1 - floor) f)
        f = (s / warmup)^2                    s <= warmup
            decay^((s - warmup) / every)      else

    `floor` is a share of the peak. As in the authors' scripts, the rate does not begin at 0, and
    the decay is continuous and ends at the floor. s = stretch * t as in `LinearThenDecay`.
    """

    peak: float
    floor: float
    warmup: int
    decay: float
    every: int
    stretch: float = 1

    def __post_init__(self):
        _require_positive(self, may_be_zero="floor")

    def __call__(self, steps_done: int) -> float:
        """The learning rate of the step after `steps_done`."""
        s = self.stretch * (steps_done + 1)
        share = (
            (s / self.warmup) ** 2
            if s <= self.warmup
            else self.decay ** ((s - self.warmup) / self.every)
        )
        return self.peak * (self.floor + (1 - self.floor) * share)


@dataclass(frozen=True)
class LinearWarmupLinearDecay:
    """The learning rate of fine-tuning: linear to `peak` in `warmup` steps, then linear to 0.

        lr = peak * s / warmup                          s < warmup
             peak * (total - s) / (total - warmup)      warmup <= s < total
             0                                          else
        s = stretch * (steps done before)

    The first step after the warm-up has the peak. warmup may be 0.
    """

    peak: float
    warmup: int
    total: int
    stretch: float = 1

    def __post_init__(self):
        _require_positive(self, may_be_zero="warmup")
        if self.warmup >= self.total:
            raise ValueError(
                f"warmup={self.warmup} of the learning rate must be below total={self.total}."
            )

    def __call__(self, steps_done: int) -> float:
        """The learning rate of the step after `steps_done`."""
        s = self.stretch * steps_done
        return self.peak * (
            s / self.warmup
            if s < self.warmup
            else max(0, self.total - s) / (self.total - self.warmup)
        )


def _require_positive(schedule: object, may_be_zero: str = "") -> None:
    for field in fields(schedule):
        value = getattr(schedule, field.name)
        if not isinstance(value, (int, float)) or not (
            value > 0 or value == 0 and field.name == may_be_zero
        ):
            raise ValueError(
                f"{field.name} of the learning rate must be a number above 0, not {value!r}."
            )


@dataclass(frozen=True)
class Phase:
    """A part of a run, with one schedule and one sequence length.

    steps: the steps of the optimizer.
    warmup: T_w, the number of them before the variance is frozen.
    micro_batch: the largest number of examples that a worker computes at once.
    lr: the learning rate as a function of the steps done in this phase.
    length: the tokens of an example; 1 if an example has no length.
    batch: the examples of a step; None: as many as the run says.
    """

    steps: int
    warmup: int
    micro_batch: int
    lr: Callable[[int], float]
    length: int = 1
    batch: int | None = None

    def __post_init__(self):
        for name in ("length", "steps", "warmup", "micro_batch"):
            if not getattr(self, name) >= 1:
                raise ValueError(
                    f"{name} of a phase must be at least 1, not {getattr(self, name)}: set "
                    f"phases.NAME.{name}."
                )


class Plan:
    """The phases of a run, one after the other: {name: Phase}."""

    def __init__(self, phases: dict[str, Phase]):
        self.phases = phases
        self.steps = sum(phase.steps for phase in phases.values())

    def at(self, step: int) -> tuple[str, Phase, int]:
        """(name, phase, the steps done before that phase) of the step after `step` steps.

        The last phase has no end.
        """
        start = 0
        for name, phase in self.phases.items():
            if step < start + phase.steps:
                return name, phase, start
            start += phase.steps
        return name, phase, start - phase.steps

    def samples(self, steps: int, batch: int) -> int:
        """The examples of the first `steps` steps; `batch` in a step whose phase does not say."""
        seen = 0
        for phase in self.phases.values():
            taken = min(steps, phase.steps)
            seen += taken * (phase.batch or batch)
            steps -= taken
        return seen + steps * (phase.batch or batch)

    def lr(self, step: int) -> float:
        """The learning rate of the step after `step` steps."""
        _, phase, start = self.at(step)
        return phase.lr(step - start)
