"""What a communicator is: three collectives over `size` ranks, and counters of their traffic."""

import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor

# The number of started processes, as torchrun, Open MPI, MPICH and Slurm's srun set it.
LAUNCHER_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class Communicator(ABC):
    """The collectives of `size` ranks.

    All ranks call the same collectives, in the same order, with the same shapes.

    Attributes:
        rank, size: this rank's number, 0 to size - 1, and the number of ranks.
        device: where the backend takes its tensors. Tensors elsewhere are copied there, and the
            results back. None: the backend takes them wherever they are.
        ordered: whether `all_reduce` adds in rank order, which gives the same bits on every rank
            and every backend, or leaves the sum to the backend.
        bytes_sent, bytes_received: what this rank has sent to others and received from them.
        calls: the number of the backend's collectives so far.

    Only bytes (uint8) are exchanged, except in the backend's own all_reduce. With one rank, or
    nothing to send, a collective returns a copy of its input and counts nothing. If some rank does
    not enter a collective, the others raise RuntimeError after the backend's time-out.

    A backend implements `duplicate`, and `_all_to_all`, `_all_gather` and `_all_reduce`. The latter
    get contiguous, nonempty tensors on `device`, and return tensors that nothing else refers to.
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
        """Row j of x, uint8 [size, k], goes to rank j; row i of the result came from rank i.

        The result has the shape of x. Each rank sends and receives (size - 1) * k bytes.
        """
        if x.dtype != torch.uint8 or x.dim() != 2 or len(x) != self.size:
            raise ValueError(f"all_to_all takes uint8 [{self.size}, k], not {_described(x)}")
        if self.size == 1 or x.numel() == 0:
            return x.clone()
        received = self._all_to_all(self._staged(x.contiguous()))
        result = self._received(received, tuple(x.shape), x.device)
        self._count(x.nbytes - x[0].nbytes)
        return result

    def all_gather(self, x: Tensor) -> Tensor:
        """Row i of the result, uint8 [size, k], is rank i's x, uint8 [k].

        Each rank sends and receives (size - 1) * k bytes.
        """
        if x.dtype != torch.uint8 or x.dim() != 1:
            raise ValueError(f"all_gather takes uint8 [k], not {_described(x)}")
        if self.size == 1 or x.numel() == 0:
            return x.repeat(self.size, 1)
        received = self._all_gather(self._staged(x.contiguous()))
        result = self._received(received, (self.size, len(x)), x.device)
        self._count((self.size - 1) * x.nbytes)
        return result

    def all_reduce(self, x: Tensor, wire_dtype: torch.dtype | None = None) -> Tensor:
        """The mean of x over the ranks: a new tensor like x, the same bits on every rank.

        x is a float tensor of any shape. Its n elements travel as `wire_dtype`, by default as they
        are. If `ordered`, an all_to_all of chunks and an all_gather of their means make 2 calls and
        send 2 * (size - 1) * ceil(n / size) * itemsize bytes; the sum is in float32, or in float64
        for float64 input. Otherwise the backend's own all_reduce adds in the wire's dtype, with 1
        call and 2 * (size - 1) * n * itemsize // size bytes. As many bytes are received.
        """
        if not x.is_floating_point():
            raise ValueError(
                f"all_reduce takes floating-point numbers, not {_described(x)}; convert with "
                "x.float()"
            )
        if self.size == 1 or x.numel() == 0:
            return x.detach().clone()
        mean = self._ordered_mean if self.ordered else self._library_mean
        return mean(self._staged(x.detach()), wire_dtype or x.dtype).to(x.device)

    @abstractmethod
    def duplicate(self) -> "Communicator":
        """A communicator of the same ranks whose collectives never meet this one's.

        All ranks must call it.
        """

    def close(self) -> None:
        """Give back what `duplicate` took, such as a process group. Nothing else is closed."""
        return

    def _received(self, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """x on `device`. Raises RuntimeError unless the backend gave it this shape."""
        if tuple(x.shape) != shape:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} received {_described(x)} instead of "
                f"{list(shape)} bytes: a message was cut off or altered, or another rank is in "
                "another collective. End the job, and resume from the last checkpoint"
            )
        return x.to(device)

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
        # In float16, which ends at 65504, the sum could overflow although the mean does not.
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

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def duplicate(self) -> "Single":
        return Single()

    def _all_to_all(self, x: Tensor) -> Tensor:
        raise AssertionError("a single rank never calls the backend")

    _all_gather = _all_reduce = _all_to_all


def launched_processes() -> tuple[str, int] | None:
    """(variable, count) of the launcher that has started more than one process, or None."""
    for name in LAUNCHER_VARIABLES:
        count = int(os.environ.get(name) or 1)
        if count > 1:
            return name, count
    return None


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
