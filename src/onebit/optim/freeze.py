"""When to freeze the variance, and what to do where it is too small."""

import math
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from onebit.kernels.torch_ops import per_block
from onebit.layout import ALIGNMENT

if TYPE_CHECKING:
    from onebit.optim.bucket import Bucket

# Learning rates; for a step of Adam's own see `onebit.optim.bounded_steps.largest_step`.
LARGEST_STEP = 100
# rows of ALIGNMENT elements that are looked at together: a whole vector's intermediate results
# would take several times its memory
PIECE = 2**12


NO_GRADIENT = (
    "no coordinate of the compressed parameters had a gradient in the warm-up (or none above "
    "1e-22, whose square is 0), so that none of them will be trained: check that the optimizer "
    "holds the parameters of the model that is trained, and that backward reaches them"
)


class Policy:
    """Answers one question: is the warm-up over after t steps? This is the contract of all.

    A policy watches the l1 norm of the variance over a window of steps. A subclass gives `wants`
    and `is_over`.

    Attributes:
        window: Delta, in steps; unless given 1 / (1 - beta2), the variance's memory.
        threshold: the variance counts as settled while
            threshold <= ||v_t||_1 / ||v_{t - Delta}||_1 <= 1 / threshold.
        norms: float64 [window + 1], the bias-corrected l1 norm after step t at t modulo
            window + 1; NaN where it was not observed.
    """

    def __init__(self, threshold: float = 0.96, window: int | None = None) -> None:
        self.threshold = threshold
        self.window: Any = window  # steps; None until `bind`

    def bind(self, beta2: float) -> None:
        """Take note of beta2; the optimizer calls this when it begins a warm-up."""
        if self.window is None:
            self.window = max(1, round(1 / (1 - beta2)))
        self.norms = torch.full((self.window + 1,), math.nan, dtype=torch.float64, device="cpu")
        self.last = 0

    def wants(self, step: int) -> bool:
        """Whether to observe the norm after this step; it costs a pass over the variance."""
        raise NotImplementedError

    def observe(self, step: int, norm: float) -> None:
        """Take note of ||v_t||_1 after step t."""
        self.norms[step % len(self.norms)] = norm
        self.last = step

    @property
    def ratio(self) -> float | None:
        """||v_t||_1 / ||v_{t - Delta}||_1 of the last step observed; None if it is not known."""
        now, before = (
            float(self.norms[step % len(self.norms)])
            for step in (self.last, self.last - self.window)
        )
        return now / before if before > 0 else None

    def is_settled(self) -> bool:
        """Whether the variance has settled at the last step observed."""
        return self.ratio is not None and self.threshold <= self.ratio <= 1 / self.threshold

    def is_over(self, step: int) -> bool:
        """Whether the warm-up is over after this step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"norms": self.norms.clone(), "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.norms.copy_(state["norms"])
        self.last = state["last"]


class FixedSteps(Policy):
    """The warm-up lasts T_w = `steps` steps; math.inf: it never ends.

    Raises ValueError unless `steps` is a whole number of at least 1.
    """

    def __init__(self, steps: float) -> None:
        super().__init__()
        whole = isinstance(steps, Integral) and not isinstance(steps, bool) or steps == math.inf
        if not whole or steps < 1:
            raise ValueError(
                f"warmup must be a whole number of steps, at least 1, not {steps!r}: compression "
                "needs a variance to freeze; 15 to 25 % of all steps is the papers' rule of thumb"
            )
        self.steps = steps if steps == math.inf else int(steps)

    def wants(self, step: int) -> bool:
        return step in (self.steps - self.window, self.steps)

    def is_over(self, step: int) -> bool:
        return step >= self.steps

    def __repr__(self) -> str:
        return f"FixedSteps({self.steps})"


class VarianceRatio(Policy):
    """The warm-up ends at the first step t >= max(min_steps, window) with a settled variance:

        threshold <= ||v_t||_1 / ||v_{t - window}||_1 <= 1 / threshold

    "1-bit Adam", section 7.1, gives the lower bound; the upper bound keeps a variance that still
    grows from counting as settled. With `hold` the ratio must stay there for so many steps in a
    row: the paper's rule also stops where a variance that has risen turns to fall.

    Args:
        threshold: 0.96 in the paper.
        min_steps: the number of learning-rate warm-up steps, in which the variance is unstable.
        window: Delta, in steps; None: 1 / (1 - beta2).
        hold: for how many steps in a row, of those from max(min_steps, window) on, the variance
            must be settled; 1 is the paper's rule; None: for a whole window.

    Raises ValueError if an option is missing or out of range.
    """

    def __init__(
        self,
        threshold: float = 0.96,
        min_steps: int | None = None,
        window: int | None = None,
        hold: int | None = 1,
    ) -> None:
        super().__init__(threshold, window)
        if min_steps is None:
            raise ValueError(
                "VarianceRatio needs min_steps, the number of learning-rate warm-up steps: the "
                "variance is unstable in them (0 if there are none)"
            )
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be between 0 and 1, not {threshold}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        if hold is not None and hold < 1:
            raise ValueError(
                f"hold must be at least 1 step, or None for a whole window, not {hold}"
            )
        self.min_steps = min_steps
        self.hold = hold
        self.settled_steps = 0
        self.chosen: int | None = None

    def wants(self, step: int) -> bool:
        return self.chosen is None

    def observe(self, step: int, norm: float) -> None:
        super().observe(step, norm)
        counts = step >= max(self.min_steps, self.window) and self.is_settled()
        self.settled_steps = self.settled_steps + 1 if counts else 0
        if self.settled_steps == (self.hold or self.window):
            self.chosen = step

    def is_over(self, step: int) -> bool:
        return self.chosen is not None and step >= self.chosen

    def state_dict(self) -> dict[str, Any]:
        own = {"chosen": self.chosen, "settled_steps": self.settled_steps}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.chosen = state.get("chosen")
        self.settled_steps = state.get("settled_steps", 0)

    def __repr__(self) -> str:
        return (
            f"VarianceRatio({self.threshold}, min_steps={self.min_steps}, window={self.window}, "
            f"hold={self.hold})"
        )


def why_unsettled(policy: Policy, steps: int) -> str | None:
    """The warning about a variance that is frozen before it has settled; None: it has settled."""
    if policy.ratio is None:
        return (
            f"the variance is frozen after {steps} steps and is not known to have settled: the "
            "warm-up was no longer than the variance's memory, 1 / (1 - beta2) = "
            f"{policy.window} steps. Training may be slow or unstable; a longer warmup is safer"
        )
    if not policy.is_settled():
        return (
            f"the variance is frozen after {steps} steps while it still changes: ||v_t||_1 / "
            f"||v_(t-{policy.window})||_1 = {policy.ratio:.3f}, outside [{policy.threshold}, "
            f"{1 / policy.threshold:.3f}]. A longer warmup, or onebit.VarianceRatio, is safer"
        )
    return None


# ---- one bit moves every coordinate of a tensor by the same momentum, so that one with a tiny
# ---- variance, such as a rare word's, runs away


def raise_to_floor(bucket: "Bucket", fraction: float) -> None:
    """v <- max(v, fraction * mean of its tensor), in place."""
    means = bucket.tensor_sums(bucket.variance) / _numels(bucket)
    floor = per_block((fraction * means).to(bucket.dtype), bucket.layout.lengths)
    rows = bucket.variance.view(-1, ALIGNMENT)
    torch.maximum(rows, floor, out=rows)
    bucket.variance.masked_fill_(~bucket.layout.real, 0)


def large_steps(bucket: "Bucket", eps: float, correction: float = 1.0) -> list[int]:
    """How many active coordinates of each parameter a compressed momentum moves by more than
    LARGEST_STEP learning rates, under v / correction."""
    scales = (bucket.tensor_sums(bucket.momentum, square=True) / _numels(bucket)).sqrt()
    rows = (
        per_block(scales, bucket.layout.lengths),
        bucket.variance.view(-1, ALIGNMENT),
        bucket.partition.active.view(-1, ALIGNMENT),
    )
    counts = torch.cat(
        [
            ((scale / ((v / correction).sqrt() + eps) > LARGEST_STEP) & active).sum(1)
            for scale, v, active in zip(*(x.split(PIECE) for x in rows))
        ]
    )
    parts = counts.split((bucket.layout.lengths // ALIGNMENT).tolist())
    return [int(part.sum()) for part in parts[: len(bucket.params)]]


def small_variance(large: dict[str, int]) -> str | None:
    """The warning about `large_steps` of parameters by their names; None: there are none."""
    if not any(large.values()):
        return None
    worst = max(large, key=lambda name: large[name])
    return (
        f"{sum(large.values())} coordinates, {large[worst]} of them in {worst}, had so little "
        "gradient while the variance was taken that each compressed step can move them by more "
        f"than {LARGEST_STEP} learning rates: set bound_steps=True, or variance_floor, 1e-3 say, "
        "which raises their variance to that fraction of their tensor's mean, or put their tensor "
        "in a group with compress=False"
    )


def _numels(bucket: "Bucket") -> torch.Tensor:
    """Elements of each tensor, at least 1; last the tail's. float64 [tensors + 1]."""
    numels = [*bucket.layout.numels, 0]
    return torch.tensor(numels, dtype=torch.float64, device=bucket.device).clamp(min=1)
