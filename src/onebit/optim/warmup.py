"""When to freeze the variance: policies that answer one question, is the warm-up over after t steps?"""

import math
from numbers import Integral

import torch


class Policy:
    """Watches the l1 norm of the variance over a window of steps.

    Attributes:
        window: Delta, steps; 1 / (1 - beta2), the memory of the variance, unless given.
        threshold: the variance counts as settled while threshold <= ||v_t||_1 / ||v_{t - Delta}||_1 <= 1 / threshold.
        norms: float64 [window + 1], the bias-corrected l1 norm after step t at t modulo window + 1; NaN where it was not observed.
    """

    def __init__(self, threshold=0.96, window=None):
        self.threshold = threshold
        self.window = window

    def bind(self, beta2):
        """Called by the optimizer once it knows beta2."""
        if self.window is None:
            self.window = max(1, round(1 / (1 - beta2)))
        self.norms = torch.full((self.window + 1,), math.nan, dtype=torch.float64)
        self.last = 0

    def wants(self, step):
        """Whether to observe the norm after this step; it costs a pass over the variance."""
        raise NotImplementedError

    def observe(self, step, norm):
        """Take note of ||v_t||_1 after step t."""
        self.norms[step % len(self.norms)] = norm
        self.last = step

    @property
    def ratio(self):
        """||v_t||_1 / ||v_{t - Delta}||_1 of the last step observed; None where it is not known."""
        now, before = (
            float(self.norms[step % len(self.norms)])
            for step in (self.last, self.last - self.window)
        )
        return now / before if before > 0 else None

    def is_settled(self):
        return self.ratio is not None and self.threshold <= self.ratio <= 1 / self.threshold

    def is_over(self, step):
        raise NotImplementedError

    def state_dict(self):
        return {"norms": self.norms.clone(), "last": self.last}

    def load_state_dict(self, state):
        self.norms.copy_(state["norms"])
        self.last = state["last"]


class FixedSteps(Policy):
    """The warm-up lasts T_w = `steps` steps."""

    def __init__(self, steps):
        super().__init__()
        whole = isinstance(steps, Integral) and not isinstance(steps, bool) or steps == math.inf
        if not whole or steps < 1:
            raise ValueError(
                f"warmup must be a whole number of steps, at least 1, not {steps!r}: "
                "compression needs a variance to freeze; 15 to 25 % of all steps is the papers' rule of thumb"
            )
        self.steps = steps if steps == math.inf else int(steps)

    def wants(self, step):
        return step in (self.steps - self.window, self.steps)

    def is_over(self, step):
        return step >= self.steps

    def __repr__(self):
        return f"FixedSteps({self.steps})"


class VarianceRatio(Policy):
    """The warm-up ends at the first step t >= max(min_steps, window) at which the variance has settled:

        threshold <= ||v_t||_1 / ||v_{t - window}||_1 <= 1 / threshold

    ("1-bit Adam", section 7.1, which gives the lower bound; the upper one keeps a variance that still grows from counting as
    settled).

    Args:
        threshold: 0.96 in the paper.
        min_steps: the number of learning-rate warm-up steps, in which the variance is unstable.
        window: Delta, steps; default 1 / (1 - beta2).
    """

    def __init__(self, threshold=0.96, min_steps=None, window=None):
        super().__init__(threshold, window)
        if min_steps is None:
            raise ValueError(
                "VarianceRatio needs min_steps, the number of learning-rate warm-up steps: the variance is unstable "
                "in them (0 if there are none)"
            )
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be between 0 and 1, not {threshold}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        self.min_steps = min_steps
        self.chosen = None

    def wants(self, step):
        return self.chosen is None

    def observe(self, step, norm):
        super().observe(step, norm)
        if step >= max(self.min_steps, self.window) and self.is_settled():
            self.chosen = step

    def is_over(self, step):
        return self.chosen is not None and step >= self.chosen

    def state_dict(self):
        return super().state_dict() | {"chosen": self.chosen}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.chosen = state.get("chosen")

    def __repr__(self):
        return f"VarianceRatio({self.threshold}, min_steps={self.min_steps}, window={self.window})"
