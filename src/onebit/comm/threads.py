"""Ranks as threads of one process, without launcher or sockets.

This is the readable definition of the other backends.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebit.comm.base import Communicator


class _Meeting:
    """Where threads exchange tensors: one slot per rank, a barrier before and after reading."""

    def __init__(self, size: int, timeout: float):
        self.timeout = timeout
        self.slots: list[tuple[str, Tensor]] = [("no collective", torch.empty(0))] * size
        self.barrier = threading.Barrier(size)
        self.duplicates: dict[int, _Meeting] = {}
        self.first_error: BaseException | None = None

    def duplicate(self, number: int) -> "_Meeting":
        """The meeting of the ranks' `number`th duplicates."""
        # setdefault is one operation, so that all ranks get the same one.
        meeting = self.duplicates.setdefault(number, _Meeting(len(self.slots), self.timeout))
        if self.barrier.broken:
            meeting.abort(self.first_error)
        return meeting

    def abort(self, error: BaseException | None) -> None:
        """Release all ranks that wait, here or in a duplicate, now and later: see `error`."""
        self.first_error = self.first_error or error
        self.barrier.abort()
        for duplicate in self.duplicates.values():
            duplicate.abort(error)

    def exchange(
        self, rank: int, name: str, x: Tensor, read: Callable, timeout: float | None
    ) -> Any:
        """read(the tensors of all ranks, by rank), once every rank is in the collective `name`."""
        self.slots[rank] = (name, x)
        self._wait(rank, name, timeout)
        error, result = None, None
        if len({(other, tensor.shape, tensor.dtype) for other, tensor in self.slots}) > 1:
            error = RuntimeError(
                "the ranks met in different collectives: "
                + ", ".join(
                    f"rank {r} in {other} {list(tensor.shape)}"
                    for r, (other, tensor) in enumerate(self.slots)
                )
                + ". Every rank must call the same collectives, in the same order, with the same "
                "shapes."
            )
        else:
            result = read([tensor for _, tensor in self.slots])
        # No rank may go on and change its tensor before all have read it. This holds after an error
        # as well, because the caller may catch it.
        self._wait(rank, name, timeout)
        if error:
            raise error
        return result

    def _wait(self, rank: int, name: str, timeout: float | None) -> None:
        began = time.monotonic()
        try:
            self.barrier.wait(timeout)
        except threading.BrokenBarrierError:
            waited = timeout is not None and time.monotonic() - began >= timeout
            if self.first_error is not None or not waited:
                raise RuntimeError(
                    f"rank {rank} was released from {name}, because another rank has failed"
                ) from self.first_error
            raise RuntimeError(
                f"rank {rank} waited in {name} for a rank that did not come within {timeout} s. "
                "Every rank must call the same collectives. If a rank is only slow, raise "
                "run_threads(timeout=)."
            ) from None


class Threads(Communicator):
    """One rank of `run_threads`, which makes these objects."""

    def __init__(self, rank: int, size: int, meeting: _Meeting):
        super().__init__(rank, size)
        self._meeting = meeting
        self._duplicates = 0

    def duplicate(self) -> "Threads":
        self._duplicates += 1
        return Threads(self.rank, self.size, self._meeting.duplicate(self._duplicates))

    def _all_to_all(self, x: Tensor) -> Tensor:
        return self._exchange(
            "all_to_all", x, lambda tensors: torch.stack([t[self.rank] for t in tensors])
        )

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._exchange("all_gather", x, torch.stack)

    def _all_reduce(self, x: Tensor) -> Tensor:
        return self._exchange("all_reduce", x, sum)

    def _exchange(self, name: str, x: Tensor, read: Callable[[list[Tensor]], Any]) -> Tensor:
        return self._meeting.exchange(self.rank, name, x, read, self._meeting.timeout)


def run_threads(size: int, fn: Callable[[Communicator], Any], timeout: float = 60) -> list:
    """Call fn(communicator) in `size` threads of this process. Returns their results by rank.

    The first error in any thread is raised here, and the other threads are released from the
    collective in which they wait. To wait in a collective longer than `timeout` seconds, or for a
    rank that has returned, is an error as well. After an error, a thread that is busy elsewhere is
    left behind after another `timeout` seconds.

    torch's settings stay as they are. Call `torch.set_num_threads(1)` first, so that the ranks do
    not compete for the cores.
    """
    meeting = _Meeting(size, timeout)
    outcomes: queue.SimpleQueue = queue.SimpleQueue()

    def work(rank: int) -> None:
        try:
            result = fn(Threads(rank, size, meeting))
            # Returning is a collective as well, so that a rank which still waits in another one
            # fails at once. It has no time-out, because the others may still work for a long time.
            meeting.exchange(
                rank, "no collective, it has returned", torch.empty(0), len, timeout=None
            )
            outcomes.put((rank, result, None))
        except BaseException as error:  # of whatever kind: it must end the other ranks
            error.add_note(f"raised by rank {rank} of {size} threads")
            outcomes.put((rank, None, error))
            meeting.abort(error)

    for rank in range(size):
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True).start()
    try:
        return _collected(size, outcomes, timeout)
    finally:
        meeting.abort(None)  # on Ctrl-C too


def _collected(size: int, outcomes: queue.SimpleQueue, timeout: float) -> list:
    results = [None] * size
    first_error = None
    for _ in range(size):
        try:
            rank, results_of_rank, error = outcomes.get(
                timeout=None if first_error is None else timeout
            )
        except queue.Empty:
            break
        results[rank] = results_of_rank
        if first_error is None:
            first_error = error
    if first_error is not None:
        raise first_error
    return results
