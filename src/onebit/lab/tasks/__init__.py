"""Tasks: what is trained, chosen in the configuration by `_target_`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Task(ABC):
    """A model with its data and its loss: all that the training loop needs of it.

    Constructing a task loads nothing, so that a configuration can be checked without its data.
    """

    evaluates = False  # whether the task implements `evaluate`

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its weights are a function of torch's random state."""

    @abstractmethod
    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        """`size` examples on the CPU, this worker's part of a step's batch.

        They are a pure function of the arguments. length: as in `training.schedule.Phase`.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss, a scalar: the mean over the batch."""

    def players(self, model: nn.Module) -> dict[str, tuple[nn.Module, Loss]]:
        """{name: (the part of the model whose parameters the player trains, its loss)}.

        In a step the players take turns in this order, on the same batch: each steps with an
        optimizer of its own before the next computes its loss. A loss gets the whole model, and
        must leave no gradients in the other parts.
        """
        return {"model": (model, self.loss)}

    def prepare(self) -> None:  # noqa: B027, a task without data need not implement it
        """Fetch the data, and cache it.

        Raises:
            RuntimeError: the data cannot be fetched; the message has the command that does.
        """

    def description(self) -> dict:
        """Facts for run.json. If there is a `summary`, captions of figures quote it."""
        return {}

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Metrics of the model on data that it was not trained on: {name: value}.

        This may leave the model in evaluation mode.
        """
        raise NotImplementedError

    def illustrate(  # noqa: B027, few tasks have something to show
        self, model: nn.Module, device: torch.device, folder: Path
    ) -> None:
        """Write pictures of what the model does into the run's folder, after each evaluation.

        They replace those of the evaluation before.
        """

    def flop(self, length: int) -> float:
        """Floating-point operations of an example, forward and backward.

        By default, 6 for each parameter and token.
        """
        with torch.device("meta"):
            return 6 * length * sum(parameter.numel() for parameter in self.model().parameters())
