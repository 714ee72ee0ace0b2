"""What changes during a run: the sequence length and the learning rate."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearThenDecay:
    """The learning rate of the paper's BERT runs: linear to `peak` in the first `warmup` steps, then times `decay` every `every`.

        lr(s) = peak * s / warmup                          s <= warmup
                peak * decay^((s - warmup) / every)        else

    The decay is continuous, as in the authors' scripts. A shrunken run follows the same curve faster: its step t, counted
    from 1, stands for step s = stretch * t.
    """

    peak: float
    warmup: int
    decay: float
    every: int
    stretch: float = 1

    def __post_init__(self):
        for name in ("peak", "warmup", "decay", "every", "stretch"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} of the learning rate must be a number above 0, not {value!r}.")

    def __call__(self, steps_done: int) -> float:
        """The learning rate of the step after `steps_done`."""
        s = self.stretch * (steps_done + 1)
        return self.peak * (min(1, s / self.warmup) if s <= self.warmup else self.decay ** ((s - self.warmup) / self.every))


@dataclass(frozen=True)
class Phase:
    """A part of a run at one sequence length.

    length: tokens of an example. steps: of the optimizer. warmup: T_w, those of them before the variance is frozen.
    micro_batch: how many examples a worker computes at once, at most. lr: a function of the steps done in this phase.
    """

    length: int
    steps: int
    warmup: int
    micro_batch: int
    lr: Callable[[int], float]

    def __post_init__(self):
        for name in ("length", "steps", "warmup", "micro_batch"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} of a phase must be at least 1, not {getattr(self, name)}: set phases.NAME.{name}.")


class Plan:
    """The phases of a run, one after the other: {name: Phase}."""

    def __init__(self, phases: dict[str, Phase]):
        self.phases = phases
        self.steps = sum(phase.steps for phase in phases.values())

    def at(self, step: int) -> tuple[str, Phase, int]:
        """Name and phase of the step after `step` steps, and the steps done before that phase. The last phase has no end."""
        start = 0
        for name, phase in self.phases.items():
            if step < start + phase.steps:
                return name, phase, start
            start += phase.steps
        return name, phase, start - phase.steps

    def lr(self, step: int) -> float:
        """The learning rate of the step after `step` steps."""
        _, phase, start = self.at(step)
        return phase.lr(step - start)
