"""What `optimizer.state` shows of a parameter: entries that are live, and copies that say so."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from onebit.optim.bucket import Bucket

if TYPE_CHECKING:
    from onebit.optim.optimizer import DistributedOptimizer

RESET = (
    "To reset moments, write zeros into them in place, "
    'optimizer.state[p]["exp_avg_sq"].zero_(); while the momentum is compressed, call '
    "restart_warmup(steps) first. To begin without any state, make a new optimizer; to go on from "
    "a saved one, call load_state_dict"
)


class ParameterState(dict[str, Any]):
    """A parameter's entries in `optimizer.state`.

    An entry that is stored is a view of it: to write into it, or to assign to its name, changes
    the optimizer's state. An entry that is computed when it is asked for (the count of steps, a
    compressed momentum, compression errors) is a `Snapshot`. Entries of other names are the user's
    own, and are saved with the rest. Copied or pickled, it becomes a plain dict of plain tensors.

    Without a bucket it is a plain dict, as which libraries make it anew that move state to another
    device.
    """

    def __init__(
        self,
        stored: Mapping[str, torch.Tensor] | Iterable = (),
        bucket: Bucket | None = None,
        index: int = 0,
        step: torch.Tensor | None = None,
    ) -> None:
        dict.__init__(self, stored)
        self._bucket, self._index, self._step = bucket, index, step
        self._addresses = {name: x.data_ptr() for name, x in self.stored().items()}

    def stored(self) -> dict[str, torch.Tensor]:
        """The entries that are stored, by name."""
        names = [] if self._bucket is None else self._bucket.stored_names()
        return {name: dict.__getitem__(self, name) for name in names}

    def foreign(self) -> dict[str, Any]:
        """The entries that are not the optimizer's."""
        own = {*self._addresses, *self._computed_names()}
        return {name: dict.__getitem__(self, name) for name in dict.keys(self) if name not in own}

    def plain(self) -> dict[str, Any]:
        """All entries as they are at this moment; what is stored is still live."""
        return {
            name: self._computed(name) if name in self._computed_names() else self[name]
            for name in self
        }

    def check(self) -> None:
        """Raise RuntimeError if a stored entry has got other memory, so that writes are lost."""
        for name, address in self._addresses.items():
            if dict.__getitem__(self, name).data_ptr() != address:
                raise RuntimeError(
                    f'the memory of optimizer.state[p]["{name}"] was replaced, so that the '
                    f"optimizer does not see what is written into it. {RESET}"
                )

    def adopt(self, found: Any) -> None:
        """Take over what somebody has put into the place of these entries.

        Raises RuntimeError, before anything changes, if an entry is missing or cannot be taken.
        """
        own = [name for name in self if name not in self.foreign()]
        missing = [name for name in own if not isinstance(found, Mapping) or name not in found]
        if missing:
            raise RuntimeError(
                f"optimizer.state lacks {', '.join(missing)} of a parameter: somebody has cleared "
                f"or replaced it, while the optimizer still has its own. {RESET}"
            )
        for name in own:
            self._check_value(name, found[name])
        for name in found:
            self[name] = found[name]

    # ---- a mapping

    def __getitem__(self, name: str) -> Any:
        if name in self._computed_names():
            return self._computed(name).as_subclass(Snapshot)
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._addresses:
            self._check_value(name, value)
            with torch.no_grad():
                dict.__getitem__(self, name).copy_(value)
        elif name in self._computed_names():
            self._check_value(name, value)
        else:
            dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self._addresses or name in self._computed_names():
            raise RuntimeError(f"the optimizer needs its entry {name!r}. {RESET}")
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:
        yield from self._computed_names()
        yield from dict.__iter__(self)

    def __len__(self) -> int:
        return len(self._computed_names()) + dict.__len__(self)

    def __contains__(self, name: object) -> bool:
        return name in self._computed_names() or dict.__contains__(self, name)

    def __repr__(self) -> str:
        return repr(self.plain())

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (self.plain(),)

    def copy(self) -> dict[str, Any]:
        """A plain dict of the entries."""
        return dict(self.items())

    def _computed_names(self) -> list[str]:
        if self._bucket is None:
            return []
        return ["step", *self._bucket.computed_names(self._index)]

    def _computed(self, name: str) -> torch.Tensor:
        if self._bucket is None or self._step is None:
            raise KeyError(name)
        return self._step.clone() if name == "step" else self._bucket.computed(name, self._index)

    def _check_value(self, name: str, value: Any) -> None:
        """Raise RuntimeError unless this entry can become `value`."""
        if name in self._addresses:
            shape = dict.__getitem__(self, name).shape
            if not torch.is_tensor(value) or value.shape != shape:
                raise RuntimeError(
                    f'optimizer.state[p]["{name}"] is a tensor of shape {tuple(shape)}, and can '
                    f"become another one of that shape only. {RESET}"
                )
            return
        now = self._computed(name)
        given = torch.as_tensor(value)
        if given.shape != now.shape or not torch.equal(given.to(now), now):
            raise RuntimeError(_cannot_write(name))


# dict's own methods look past what is computed, and past __setitem__
for _name in ("get", "keys", "items", "values", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(ParameterState, _name, getattr(MutableMapping, _name))


class Snapshot(torch.Tensor):
    """A copy of an entry of `optimizer.state` that is not stored as it is shown.

    To write into it would change nothing, and raises RuntimeError. What is computed from it is a
    plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [x for many in given if isinstance(many, (list, tuple)) for x in many]
        with torch._C.DisableTorchFunctionSubclass():
            copies = [x for x in given if isinstance(x, Snapshot)]
            before = [x._version for x in copies]
            result = func(*args, **(kwargs or {}))
            if before != [x._version for x in copies]:
                raise RuntimeError(_cannot_write("exp_avg"))
            places = {x.untyped_storage().data_ptr() for x in copies}
            if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
                return type(result)(_as_copy(x, places) for x in result)
            return _as_copy(result, places)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()


def _as_copy(x: Any, places: set[int]) -> Any:
    """A view of a `Snapshot` is one, too."""
    if type(x) is not torch.Tensor or x.device.type == "meta":
        return x
    return x.as_subclass(Snapshot) if x.untyped_storage().data_ptr() in places else x


def _cannot_write(name: str) -> str:
    if name == "step":
        return f"the count of steps belongs to all parameters together. {RESET}"
    return (
        "this tensor is a copy: the optimizer keeps a compressed momentum packed, and errors in a "
        f"form of their own, so that what is written into it would be lost. {RESET}"
    )


def follow(optimizer: "DistributedOptimizer") -> None:
    """Take note of what somebody has put into `optimizer.state` since the last step.

    Raises RuntimeError, with the remedy, if the optimizer cannot go on from it.
    """
    state = optimizer.state
    for p, own in optimizer._run.shown.items():
        found = state.get(p)
        if found is not own:
            own.adopt(found)
            state[p] = own
        own.check()
