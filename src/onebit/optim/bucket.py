"""Parameters that travel together, and their optimizer state as flat vectors."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onebit import kernels
from onebit.allreduce import CompressedAllreduce
from onebit.kernels.torch_ops import Terms, block_sums, group_sums
from onebit.layout import Layout, Partition
from onebit.optim.validation import check_unchanged

Group = dict[str, Any]


def buckets(groups: Sequence[Group], cap: float | None) -> list[list[tuple[Group, list]]]:
    """Cut the parameters of `groups` into buckets, each [(group, its parameters), ...].

    The last parameters come first: backward makes their gradients first, so that bucket 0 is the
    first whose gradients are complete.

    Args:
        groups: parameter groups.
        cap: the most bytes that a bucket may hold, unless a single parameter is larger;
            None: everything goes into one bucket.
    """
    found: list[list[tuple[Group, list]]] = []
    used = 0
    for group in reversed(groups):
        for p in reversed(group["params"]):
            if not found or (cap is not None and used + p.nbytes > cap):
                found.append([])
                used = 0
            bucket = found[-1]
            if not bucket or bucket[0][0] is not group:
                bucket.insert(0, (group, []))
            bucket[0][1].insert(0, p)
            used += p.nbytes
    return found


class Bucket:
    """Parameters that travel together, and their optimizer state as flat vectors in one layout.

    Args:
        contents: [(group, parameters), ...], see `buckets`.
        ranks: W, the number of ranks.
        compress: whether the groups ask for compression.
        vectors: what is kept for each element: attribute of this object -> name in
            `optimizer.state`.
        tensor_scalars: what is kept for each tensor: attribute, and name in `optimizer.state` ->
            value at the start.
        with_gradient: see `RunState`.

    Attributes:
        momentum, and the others of `vectors`: float [layout.size]; float64 if a parameter is,
            else float32. May be assigned. A packed momentum is decoded anew at every access.
        those of `tensor_scalars`: float64 [tensors], on the CPU.
        packed: the momentum as the payload uint8 [W, row_bytes] in which it came; None: it is
            stored as a vector.
        allreduce: the `CompressedAllreduce` that holds the compression errors; None: there are
            none.
        partition: one scale per tensor, with the allreduce's mask; without errors everything but
            padding is active.
        spans: for each group (group, slice of the vectors).
        wire_dtype: the dtype that all gradients share, else that of the vectors.
    """

    def __init__(
        self,
        contents: Sequence[tuple[Group, list[torch.nn.Parameter]]],
        ranks: int,
        compress: bool,
        vectors: Mapping[str, str],
        tensor_scalars: Mapping[str, float],
        with_gradient: Container[torch.Tensor],
    ) -> None:
        self.compress = compress
        self.vectors = vectors
        self.tensor_scalars = tensor_scalars
        self._with_gradient = with_gradient
        self.params = [p for _, params in contents for p in params]
        self.groups = [group for group, params in contents for _ in params]
        self.device = self.params[0].device
        self.kernels = kernels.for_device(self.device.type)
        self.layout = Layout([p.shape for p in self.params], ranks, self.device)
        self.dtypes = [p.dtype for p in self.params]
        self.dtype = torch.float64 if torch.float64 in self.dtypes else torch.float32
        self.wire_dtype = self.dtypes[0] if len(set(self.dtypes)) == 1 else self.dtype
        for attribute in vectors:
            setattr(self, attribute, self._zeros())
        for name, value in tensor_scalars.items():
            setattr(self, name, self._numbers(value))
        self.drop_errors()
        self._gradient = None
        self.spans, first = [], 0
        for group, params in contents:
            self.spans.append((group, self.layout.span(first, first + len(params))))
            first += len(params)

    allreduce: Any
    packed: torch.Tensor | None = None

    if TYPE_CHECKING:  # the attributes that `vectors` and `tensor_scalars` name

        def __getattr__(self, name: str) -> torch.Tensor: ...

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)

    def _numbers(self, value: float) -> torch.Tensor:
        return torch.full((len(self.params),), value, dtype=torch.float64, device="cpu")

    # ---- compression errors and momentum

    def hold_errors(
        self, allreduce: CompressedAllreduce, partition: Partition | None = None
    ) -> None:
        """Keep the errors of `allreduce`. `partition` has one scale per tensor; None: the
        allreduce's own partition does."""
        self.allreduce, self.partition = allreduce, partition or allreduce.partition

    def drop_errors(self) -> None:
        """Keep no compression errors."""
        self.allreduce = None
        self.partition = self.layout.worker_partition()

    def errors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(worker error [layout.size], server error [layout.chunk]); zeros if there are none."""
        return self._worker_error(), self._server_error()

    def _worker_error(self) -> torch.Tensor:
        """Float [layout.size]; zeros without errors."""
        return self.allreduce.worker_error if self.allreduce else self._zeros()

    def _server_error(self) -> torch.Tensor:
        """Float [layout.chunk]; zeros without errors."""
        if self.allreduce:
            return self.allreduce.server_error
        return torch.zeros(self.layout.chunk, dtype=self.dtype, device=self.device)

    @property
    def momentum(self) -> torch.Tensor:
        """m, float [layout.size]."""
        return self._momentum if self.packed is None else self.allreduce.decode(self.packed)

    @momentum.setter
    def momentum(self, value: torch.Tensor) -> None:
        self._momentum, self.packed = value, None

    def pack_momentum(self, payload: torch.Tensor) -> None:
        """From now on `payload` is the momentum; no vector of it, nor a flat gradient, is kept."""
        self.packed = payload
        self._momentum = self._gradient = None

    # ---- parameters and gradients

    def per_tensor(self, value: Callable[[Group], Any]) -> list:
        """value(group) for each parameter."""
        values = {id(group): value(group) for group, _ in self.spans}
        return [values[id(group)] for group in self.groups]

    def follow_groups(self, groups: Mapping[int, Group]) -> None:
        """Read the options of other group objects from now on: id of a group -> its successor."""
        self.groups = [groups[id(group)] for group in self.groups]
        self.spans = [(groups[id(group)], span) for group, span in self.spans]

    def check_tensors(self) -> None:
        """Raise RuntimeError if a parameter or gradient is no longer what the layout was made for.

        Kernels get addresses, and the lengths of the layout.
        """
        check_unchanged(self.params, self.layout.shapes, self.dtypes, self.device)

    def trained(self) -> list[torch.nn.Parameter | None]:
        """Each parameter, or None if it is to be left alone, even by weight decay: one that is
        frozen, or has not had a gradient on any rank."""
        return [p if p.requires_grad and p in self._with_gradient else None for p in self.params]

    def gradients(self) -> list[torch.Tensor | None]:
        """This rank's gradient of each parameter, or None."""
        return [p.grad for p in self.params]

    def flat(
        self, tensors: Iterable[torch.Tensor | None], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tensors as a flat vector, a new one or `out`; None counts as zero."""
        return self._laid_out(tensors, self._zeros() if out is None else out)

    def flat_gradient(self) -> torch.Tensor:
        """This rank's gradients as a flat vector, whose memory the next call uses again.

        A gradient that is None counts as zero.
        """
        if self._gradient is None:
            self._gradient = self._zeros()
        return self._laid_out(self.gradients(), self._gradient)

    def drop_gradient(self) -> None:
        """Make a new flat gradient next time: something was written into the padding of this one,
        where zeros must stand."""
        self._gradient = None

    def _laid_out(
        self, tensors: Iterable[torch.Tensor | None], vector: torch.Tensor
    ) -> torch.Tensor:
        for tensor, view in zip(tensors, self.layout.views(vector)):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)
        return vector

    def terms(self, z: torch.Tensor) -> Terms:
        """The flat vector z as what the allreduce takes, which may see one tensor in it."""
        return Terms(self.allreduce.layout.views(z))

    def tensor_sums(self, x: torch.Tensor, square: bool = False) -> torch.Tensor:
        """The sum of each tensor inside x [layout.size], or of its squares: float64 [tensors + 1].

        The last is that of the tail, which is 0.
        """
        return group_sums(self.partition, block_sums(self.partition, x, square))

    # ---- what `optimizer.state` and checkpoints show

    def stored(self) -> list[dict[str, torch.Tensor]]:
        """For each parameter what of its state is stored: views into the vectors."""
        return self._by_parameter(
            {
                name: getattr(self, attribute)
                for attribute, name in self.vectors.items()
                if name in self.stored_names()
            }
        )

    def stored_names(self) -> list[str]:
        """The names of what is `stored`."""
        packed = None if self.packed is None else self.vectors["momentum"]
        return [name for name in (*self.vectors.values(), *self.tensor_scalars) if name != packed]

    def computed_names(self, i: int) -> list[str]:
        """The names of the entries of parameter i that are not stored, see `computed`."""
        packed = [] if self.packed is None else [self.vectors["momentum"]]
        errors = ["worker_error", "server_error"] if self.allreduce else []
        return packed + (errors if i == 0 else errors[:1])

    def everything(self) -> list[dict[str, torch.Tensor]]:
        """For each parameter its whole state without errors; what is not stored is computed."""
        return self._by_parameter(
            {name: getattr(self, attribute) for attribute, name in self.vectors.items()}
        )

    def copies(self, errors: bool) -> list[dict[str, torch.Tensor]]:
        """For each parameter its whole state, as tensors that share no memory.

        One vector after the other is computed and dropped, the largest temporaries first.

        Args:
            errors: include the compression errors. The server error belongs to a chunk, not to a
                parameter, and stands with the first parameter, on every rank alike.
        """
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.params]
        if errors:
            self._copy("worker_error", self._worker_error(), found)
            found[0]["server_error"] = self._server_error().clone()
        for attribute, name in self.vectors.items():
            self._copy(name, getattr(self, attribute), found)
        for name in self.tensor_scalars:
            for entries, value in zip(found, getattr(self, name)):
                entries[name] = value.clone()
        return found

    def _copy(self, name: str, vector: torch.Tensor, found: list[dict[str, torch.Tensor]]) -> None:
        for entries, view in zip(found, self.layout.views(vector)):
            entries[name] = view.clone()

    def computed(self, name: str, i: int) -> torch.Tensor:
        """The entry `name` of parameter i, which is not stored. Raises KeyError if it has none."""
        if name == self.vectors.get("momentum") and self.packed is not None:
            return self.layout.views(self.momentum)[i]
        if name == "worker_error" and self.allreduce:
            return self.layout.views(self.allreduce.worker_error)[i]
        if name == "server_error" and self.allreduce and i == 0:
            return self.allreduce.server_error
        raise KeyError(name)

    def _by_parameter(self, vectors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        views = {name: self.layout.views(vector) for name, vector in vectors.items()}
        views |= {
            name: [value.view(()) for value in getattr(self, name).split(1)]
            for name in self.tensor_scalars
        }
        return [{name: views[name][i] for name in views} for i in range(len(self.params))]
