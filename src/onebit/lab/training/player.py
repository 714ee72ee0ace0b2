"""Who trains: most tasks have one player, a generative adversarial network has two."""

from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR

from onebit.lab.tasks import Loss
from onebit.lab.training.precision import LossScale


class Player:
    """A loss, the optimizer of the parameters that are to lower it, and the learning rate and loss scale of this optimizer.

    name, loss: as in `Task.players`.
    optimizer: made with a rate of 1.
    lr: the learning rate after so many steps.
    """

    def __init__(
        self, name: str, loss: Loss, optimizer, lr: Callable[[int], float], precision: str
    ):
        self.name = name
        self.loss = loss
        self.optimizer = optimizer
        self.scheduler = LambdaLR(optimizer, lr)
        self.scale = LossScale(precision)
        self.skipped = self.diverged = False

    def step(self) -> None:
        """A step with the gradients that backward has left. All ranks must call it."""
        self.scale.unscale(p for group in self.optimizer.param_groups for p in group["params"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        # Gradients that are not finite are skipped by all ranks alike; a smaller loss scale may cure them, else nothing.
        self.skipped = self.optimizer.last_step_skipped
        self.diverged = self.skipped and not self.scale.can_shrink
        self.scale.update(self.skipped)

    def state_dict(self) -> dict:
        return {name: part.state_dict() for name, part in self._parts()}

    def load_state_dict(self, state: dict) -> None:
        for name, part in self._parts():
            part.load_state_dict(state[name])

    def _parts(self):
        return (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("scale", self.scale))
