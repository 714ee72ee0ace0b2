"""All that changes in an optimizer besides `state` and `param_groups`, in one object."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from onebit.comm.background import Background, Inline
from onebit.optim.traffic import Meter

if TYPE_CHECKING:
    from onebit.optim.bucket import Bucket
    from onebit.optim.overlap import Overlap
    from onebit.optim.state import ParameterState


@dataclass(eq=False)
class RunState:
    """What changes while an optimizer runs.

    Wrappers such as those of Lightning and Fabric copy the attributes of an optimizer once, when
    they are made. They and the optimizer then hold the same RunState, so that neither can miss
    what the other changes. An optimizer that has more to remember extends this class, and names
    its extension as `run_state`.

    Attributes:
        options: the constructor's options, by name; see `Option`.
        step: float32 scalar, the steps taken, without those skipped.
        buckets: those of compressed groups first.
        groups, params, compress_flags: the groups when the buckets were made, the parameters of
            each, and each one's `compress`.
        shown: the parameters' entries in `optimizer.state`.
        given: the keywords that the constructor was called with.
        runner: runs the exchanges, in the background or at once.
        overlap: what begins exchanges during backward; None: they begin in `step`.
        meter: counts the bytes; made by the constructor.
        ranks_are_compared: whether the ranks have been found to hold the same.
        compared_at: the step after which parameters and state were last compared.
        is_changing: whether a step or a sync is changing the state; if it fails, this remains.
        errors_are_shared: whether all ranks hold the same compression errors.
        last_step_skipped: whether the ranks agreed to skip the last step.
        skips: how many steps in a row were skipped.
        is_synced: whether all ranks hold the same model.
        with_gradient: the parameters that have had a gradient on some rank, as far as this rank
            knows; the ranks agree on it whenever they meet.
        moved: the parameters that the ranks have trained apart since the last sync.
        warned_of: what the user has been warned of, and need not be told again.
        bounded: for each bucket how many coordinates the last step has bounded, int64 [].
    """

    options: dict[str, Any] = field(default_factory=dict)
    step: torch.Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu")
    )
    buckets: list["Bucket"] = field(default_factory=list)
    groups: list[dict] = field(default_factory=list)
    params: list[list[torch.Tensor]] = field(default_factory=list)
    compress_flags: list[bool] = field(default_factory=list)
    shown: dict[torch.Tensor, "ParameterState"] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    runner: Background | Inline = field(default_factory=Inline)
    overlap: "Overlap | None" = None
    meter: Meter = field(init=False)
    ranks_are_compared: bool = False
    compared_at: int = 0
    is_changing: bool = False
    errors_are_shared: bool = False
    last_step_skipped: bool = False
    skips: int = 0
    is_synced: bool = True
    with_gradient: set[torch.Tensor] = field(default_factory=set)
    moved: set[torch.Tensor] = field(default_factory=set)
    warned_of: set[str] = field(default_factory=set)
    bounded: list[torch.Tensor] = field(default_factory=list)


class _Option:
    """An option of an optimizer as an attribute, which users may read and assign.

    The value lives in the optimizer's `RunState`, and so is the same through every wrapper.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        return self if optimizer is None else optimizer._run.options[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer._run.options[self._name] = value


def Option() -> Any:
    """Declare an option: `lr: float = Option()` in the body of an optimizer's class."""
    return _Option()
