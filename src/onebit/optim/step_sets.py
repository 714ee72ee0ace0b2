"""When 0/1 Adam updates its variance and when it syncs.

Both follow from the number of the step and from what was done before, and from nothing else.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from onebit.optim.validation import check_whole


@dataclass
class Intervals:
    """Events whose distance doubles.

    After event j = 0, 1, ... the next one is due min(2^floor(j / scaler), longest) steps later.

    Attributes:
        due: the step at which the next event is due; the first is step 1.
        count: events so far.
    """

    scaler: int
    longest: float = inf
    due: int = 1
    count: int = 0

    def is_due(self, t: int) -> bool:
        """Whether an event is due at step t."""
        return t >= self.due

    def happened(self, t: int) -> None:
        """An event happened at step t."""
        doublings = self.count // self.scaler
        self.due = t + int(min(2**doublings, self.longest))
        self.count += 1


@dataclass
class StepSets:
    """T_v, the steps that update the variance, and T_u, those that sync.

    The variance changes only where nothing has been accumulated. So an update that falls due
    between two syncs waits for the first step after a sync, and that step syncs too.

    Args:
        variance_freeze_step: the last step that may update the variance.
        variance_update_scaler: kappa; the distance of two updates doubles after so many of them.
        local_step_scaler: the distance of two syncs doubles after so many of them.
        local_step_clipper: H, the largest distance of two syncs.

    Attributes:
        last_update: the last step that may update the variance, also after a `restart`.
        is_empty: whether nothing has been accumulated.
    """

    variance_freeze_step: float
    variance_update_scaler: int = 16
    local_step_scaler: int = 32678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        for name in (
            "variance_freeze_step",
            "variance_update_scaler",
            "local_step_scaler",
            "local_step_clipper",
        ):
            check_whole(name, getattr(self, name), 1)
        self.variance = Intervals(self.variance_update_scaler)
        self.syncs = Intervals(self.local_step_scaler, self.local_step_clipper)
        self.last_update = self.variance_freeze_step
        self.is_empty = True

    def updates_variance(self, t: int) -> bool:
        """Whether step t is in T_v."""
        return self.is_empty and t <= self.last_update and self.variance.is_due(t)

    def syncs_at(self, t: int) -> bool:
        """Whether step t is in T_u."""
        return self.updates_variance(t) or self.syncs.is_due(t)

    def took(self, t: int) -> None:
        """Step t was taken."""
        syncs = self.syncs_at(t)
        if self.updates_variance(t):
            self.variance.happened(t)
        if syncs:
            self.synced(t)
        else:
            self.is_empty = False

    def synced(self, t: int) -> None:
        """The ranks have synced after step t, so that nothing is accumulated any more."""
        self.syncs.happened(t)
        self.is_empty = True

    def restart(self, t: int, steps: int) -> None:
        """Update the variance in `steps` more steps after step t, as often as at the start.

        Between two syncs the next step syncs, and does not count.
        """
        if not self.is_empty:
            t += 1
            self.syncs.due = min(self.syncs.due, t)
        self.last_update = t + steps
        self.variance = Intervals(self.variance_update_scaler, due=t + 1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of them."""
        return {
            "variance": [self.variance.due, self.variance.count],
            "syncs": [self.syncs.due, self.syncs.count],
            "is_empty": self.is_empty,
            "last_update": self.last_update,
            "variance_freeze_step": self.variance_freeze_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.variance.due, self.variance.count = state["variance"]
        self.syncs.due, self.syncs.count = state["syncs"]
        self.is_empty = state["is_empty"]
        # otherwise the user has changed it, and the new one holds
        if state["variance_freeze_step"] == self.variance_freeze_step:
            self.last_update = state["last_update"]


def step_sets(steps: int, **options: Any) -> tuple[set[int], set[int]]:
    """(T_v, T_u) within steps 1, ..., `steps`. Options are those of `StepSets`."""
    sets = StepSets(**options)
    T_v, T_u = set(), set()
    for t in range(1, steps + 1):
        if sets.updates_variance(t):
            T_v.add(t)
        if sets.syncs_at(t):
            T_u.add(t)
        sets.took(t)
    return T_v, T_u
