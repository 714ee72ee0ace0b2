"""Players: most tasks have one, a generative adversarial network has two."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from onebit.lab.tasks import Loss
from onebit.lab.training.precision import LossScale


class Player:
    """A loss, and the optimizer that lowers it, with its learning rate and loss scale.

    name, loss: as in `Task.players`.
    optimizer: made with a learning rate of 1.
    lr: the learning rate as a function of the steps done.
    precision: a key of `precision.DTYPES`.
    """

    def __init__(
        self,
        name: str,
        loss: Loss,
        optimizer: Optimizer,
        lr: Callable[[int], float],
        precision: str,
    ):
        self.name = name
        self.loss = loss
        self.optimizer = optimizer
        self.scheduler = LambdaLR(optimizer, lr)
        self.scale = LossScale(precision)
        self.skipped = self.diverged = False

    def step(self) -> None:
        """Take a step with the gradients that backward has left. All ranks must call it."""
        self.scale.unscale(p for group in self.optimizer.param_groups for p in group["params"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        # All ranks skip a step whose gradients are not finite. Only a smaller loss scale can help.
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
