"""What a communicator is: three collectives over `size` ranks, and counters of what they cost."""

import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor

# Set by torchrun, Open MPI, MPICH and Slurm's srun, in this order: the number of processes that they started.
LAUNCHER_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class Communicator(ABC):
    """The collectives of `size` ranks. All ranks call the same ones, in the same order, with the same shapes.

    Attributes:
        rank, size: this rank's number, 0 to size - 1, and how many there are.
        device: where the backend takes its tensors; tensors elsewhere are copied there and the results
            back. None: wherever they are.
        ordered: whether `all_reduce` adds in rank order, which gives the same bits on every rank and every
            backend, or leaves the sum to the backend.
        bytes_sent, bytes_received: what left this rank for other ranks, and what came from them.
        calls: collectives of the backend so far.

    Only bytes (uint8) are exchanged, except in the backend's own all_reduce. With one rank, or nothing to
    send, a collective returns a copy of its input and counts nothing. A collective that some rank does not
    enter ends in a RuntimeError after the backend's time-out.

    A backend fills in `_all_to_all`, `_all_gather` and `_all_reduce`, with tensors that are contiguous, not
    empty and on `device`, and returns tensors that nobody else holds; and `duplicate`.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device | None = None, ordered: bool = True
    ):
        self.rank = rank
        self.size = size
        self.device = device
        self.ordered = ordered
        self.bytes_sent = 0
        self.bytes_received = 0
        self.calls = 0

    def all_to_all(self, x: Tensor) -> Tensor:
        """Row j of x, uint8 [size, k], goes to rank j; row i of the result, of the same shape, came from rank i.

        (size - 1) * k bytes sent, as many received.
        """
        if x.dtype != torch.uint8 or x.dim() != 2 or len(x) != self.size:
            raise ValueError(f"all_to_all takes uint8 [{self.size}, k], not {_described(x)}")
        if self.size == 1 or x.numel() == 0:
            return x.clone()
        result = self._all_to_all(self._staged(x.contiguous())).to(x.device)
        self._count(x.nbytes - x[0].nbytes)
        return result

    def all_gather(self, x: Tensor) -> Tensor:
        """Row i of the result, uint8 [size, k], is rank i's x, uint8 [k].

        (size - 1) * k bytes sent, as many received.
        """
        if x.dtype != torch.uint8 or x.dim() != 1:
            raise ValueError(f"all_gather takes uint8 [k], not {_described(x)}")
        if self.size == 1 or x.numel() == 0:
            return x.repeat(self.size, 1)
        result = self._all_gather(self._staged(x.contiguous())).to(x.device)
        self._count((self.size - 1) * x.nbytes)
        return result

    def all_reduce(self, x: Tensor, wire_dtype: torch.dtype | None = None) -> Tensor:
        """The mean of x over the ranks: a new tensor of x's shape and dtype, the same bits on every rank.

        x is float, of any shape; its n elements travel as `wire_dtype`, by default their own.
        Ordered, it is an all_to_all of chunks and an all_gather of their means: 2 calls and
        2 * (size - 1) * ceil(n / size) * itemsize bytes sent, as many received. The sum is in float32, or
        float64 for float64 input. Otherwise it is the backend's own all_reduce, in the wire's dtype: 1 call,
        2 * (size - 1) * n * itemsize // size bytes.
        """
        if not x.is_floating_point():
            raise ValueError(
                f"all_reduce takes floating-point numbers, not {_described(x)}; convert with x.float()"
            )
        if self.size == 1 or x.numel() == 0:
            return x.detach().clone()
        mean = self._ordered_mean if self.ordered else self._library_mean
        return mean(self._staged(x.detach()), wire_dtype or x.dtype).to(x.device)

    @abstractmethod
    def duplicate(self) -> "Communicator":
        """A communicator of the same ranks whose collectives never meet this one's. All ranks must call it."""

    def _ordered_mean(self, x: Tensor, wire_dtype: torch.dtype) -> Tensor:
        sent = x.flatten().to(wire_dtype)
        padding = -len(sent) % self.size
        if padding:
            sent = torch.cat([sent, sent.new_zeros(padding)])
        terms = self.all_to_all(sent.view(self.size, -1).view(torch.uint8)).view(wire_dtype)
        total = terms[0].to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        for term in terms[1:]:
            total += term
        mean = total.div_(self.size).to(wire_dtype)
        gathered = self.all_gather(mean.view(torch.uint8)).view(wire_dtype)
        return gathered.flatten()[: x.numel()].view(x.shape).to(x.dtype)

    def _library_mean(self, x: Tensor, wire_dtype: torch.dtype) -> Tensor:
        # float16 ends at 65504, so its sum could overflow where its mean does not.
        terms = self.size if wire_dtype == torch.float16 else 1
        summed = self._all_reduce((x / terms).to(wire_dtype).contiguous())
        self._count(2 * (self.size - 1) * summed.nbytes // self.size)
        return summed.to(x.dtype) / (self.size / terms)

    def _staged(self, x: Tensor) -> Tensor:
        """x on the backend's kind of device; a tensor on a second GPU stays there."""
        return x if self.device is None or x.device.type == self.device.type else x.to(self.device)

    def _count(self, nbytes: int) -> None:
        self.bytes_sent += nbytes
        self.bytes_received += nbytes
        self.calls += 1

    @abstractmethod
    def _all_to_all(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; x may be overwritten."""


class Single(Communicator):
    """One worker, on purpose: nothing is sent, whatever a launcher has started."""

    def __init__(self):
        super().__init__(rank=0, size=1)

    def duplicate(self) -> "Single":
        return Single()

    def _all_to_all(self, x: Tensor) -> Tensor:
        raise AssertionError("one rank has nobody to send to")

    _all_gather = _all_reduce = _all_to_all


def launched_processes() -> tuple[str, int] | None:
    """The launcher's variable that counts more than one process, and the count; None if there is none."""
    for name in LAUNCHER_VARIABLES:
        count = int(os.environ.get(name) or 1)
        if count > 1:
            return name, count
    return None


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
