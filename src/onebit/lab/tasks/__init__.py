"""What is trained: model, data and loss, chosen in the config by `_target_`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Task(ABC):
    """A model with its data. The training loop (`onebit.lab.training.loop`) asks for nothing else.

    Making a task loads nothing, so that a configuration can be looked at where its data is not.
    """

    evaluates = False  # whether `evaluate` is there

    @abstractmethod
    def model(self) -> nn.Module:
        """A new torch module; its weights follow from torch's random state."""

    @abstractmethod
    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        """`size` examples, this worker's part of a step's batch, on the CPU: a pure function of its arguments. length: see `Phase`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """A scalar, the mean over the batch."""

    def players(self, model: nn.Module) -> dict[str, tuple[nn.Module, Loss]]:
        """Who trains the model: {name: (the part whose parameters it trains, its loss)}.

        In a step they take turns, in this order: each on the same batch, after the one before has stepped, with an optimizer of its own.
        A loss is given the whole model, and must leave no gradients in the other parts.
        """
        return {"model": (model, self.loss)}

    def prepare(self) -> None:  # noqa: B027, a task without data need not have it
        """Fetch and cache the data. RuntimeError, with the remedy, if it is not to be had."""

    def description(self) -> dict:
        """A few facts for run.json. `summary`, if it is there, is what a figure's caption says of model and data."""
        return {}

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Metrics of the model on data that it was not trained on: {name: value}. It may leave the model in evaluation mode."""
        raise NotImplementedError

    def illustrate(self, model: nn.Module, device: torch.device, folder: Path) -> None:  # noqa: B027, few tasks have something to show
        """After each evaluation: write pictures of what the model does into the run's folder, over those of the evaluation before."""

    def flop(self, length: int) -> float:
        """Floating-point operations that an example takes, forward and backward: 6 for each parameter and token."""
        with torch.device("meta"):
            return 6 * length * sum(parameter.numel() for parameter in self.model().parameters())
