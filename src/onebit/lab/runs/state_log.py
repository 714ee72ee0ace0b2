"""What is recorded of an optimizer's state, tensor by tensor: the rows of tensors.csv."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module

# {quantity of a tensor: whether it is a norm, which can be taken over all tensors together}
QUANTITIES = {"coefficient": False, "ratio": False, "variance": True, "variance_change": True}
ALL = "all"


class Watch:
    """What is recorded: every `every` steps a row of tensors.csv for each tensor.

        coefficient      c of LAMB and 1-bit LAMB in the step
        ratio            r of 1-bit LAMB
        variance         ||v_t||_2, of v as it is in optimizer.state
        variance_change  ||v_t - v_{t-1}||_2

    A quantity that the optimizer does not have is left empty.

    every: a number of steps, a multiple of record_every.
    quantities: some of these.
    by_tensor: if False, there is one row, "all", for all tensors together, of norms only.
    """

    def __init__(self, *, every: int, quantities: list[str], by_tensor: bool = True):
        unknown = [
            name
            for name in quantities
            if name not in QUANTITIES or not (by_tensor or QUANTITIES[name])
        ]
        if unknown or not quantities:
            choices = [name for name, is_norm in QUANTITIES.items() if by_tensor or is_norm]
            raise ValueError(
                f"watch.quantities are some of {', '.join(choices)}, not "
                f"{', '.join(unknown) or 'none'}."
            )
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"watch.every must be at least 1, not {every!r}.")
        self.every = every
        self.quantities = tuple(quantities)
        self.by_tensor = by_tensor


class Watcher:
    """Reads the state of one worker's optimizers, which share the model's parameters.

    `before` and `after` are called around each of their steps.
    """

    def __init__(self, watch: Watch, model: Module, optimizers: list):
        self.watch = watch
        owners = {
            p: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self.watched = [(name, p, owners[p]) for name, p in model.named_parameters() if p in owners]
        self.earlier = {}  # v_{t-1} by name

    def before(self, step: int) -> None:
        """Note what has to be known before step `step`, counted from 1."""
        if step % self.watch.every == 0 and "variance_change" in self.watch.quantities:
            self.earlier = {name: v.clone() for name, v in self._variances()}

    def after(self, step: int) -> list[dict]:
        """The rows of tensors.csv for this step: none unless `every` divides it."""
        if step % self.watch.every:
            return []
        values = {
            quantity: dict(getattr(self, f"_{quantity}")()) for quantity in self.watch.quantities
        }
        if not self.watch.by_tensor:
            values = {
                quantity: {ALL: sum(x * x for x in norms.values()) ** 0.5} if norms else {}
                for quantity, norms in values.items()
            }
        names = [name for name, *_ in self.watched] if self.watch.by_tensor else (ALL,)
        rows = [
            {"tensor": name}
            | {q: float(f"{found[name]:.6g}") for q, found in values.items() if name in found}
            for name in names
        ]
        return [row for row in rows if len(row) > 1]

    def _coefficient(self) -> Iterator[tuple[str, float]]:
        return self._numbers("coefficient")

    def _ratio(self) -> Iterator[tuple[str, float]]:
        return self._numbers("ratio")

    def _variance(self) -> Iterator[tuple[str, float]]:
        return ((name, float(torch.linalg.vector_norm(v))) for name, v in self._variances())

    def _variance_change(self) -> Iterator[tuple[str, float]]:
        return (
            (name, float(torch.linalg.vector_norm(v - self.earlier[name])))
            for name, v in self._variances()
        )

    def _numbers(self, key: str) -> Iterator[tuple[str, float]]:
        return (
            (name, float(optimizer.state[p][key]))
            for name, p, optimizer in self.watched
            if key in optimizer.tensor_scalars
        )

    def _variances(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, optimizer.state[p][optimizer.vectors["variance"]])
            for name, p, optimizer in self.watched
            if "variance" in optimizer.vectors
        )
