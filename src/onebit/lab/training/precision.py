"""Half precision: its types, and the loss scale that float16 needs."""

from collections.abc import Iterable

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale:
    """A factor on the loss, so that float16 gradients do not vanish.

    It is halved when a step overflows, and doubled after `patience` steps that do not. The
    optimizer sees unscaled gradients, and all ranks skip a step in which some are not finite, so
    that all ranks have the same scale. Without float16 the scale is always 1.
    """

    def __init__(self, precision: str, patience: int = 2000):
        self.dynamic = precision == "fp16"
        self.patience = patience
        self.value = 2.0**16 if self.dynamic else 1.0
        self.good_steps = 0

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow may be due to the scale."""
        return self.dynamic and self.value > 1

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.value != 1:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / self.value)

    def update(self, skipped: bool) -> None:
        """Adapt the scale after a step that was taken, or skipped because it overflowed."""
        if not self.dynamic:
            return
        self.good_steps = 0 if skipped else self.good_steps + 1
        if skipped:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self.patience:
            self.value *= 2
            self.good_steps = 0

    def state_dict(self) -> dict:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]
