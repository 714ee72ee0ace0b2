"""Communicators that stand in for a network: one that is slow, and one that is not there."""

import time

import torch
from torch import Tensor

from onebit.comm import Communicator


class Delayed(Communicator):
    """Another communicator's collectives, as if over a link of `rate_mbit` megabits a second.

    Each takes at least as long as the link would need for its bytes.
    """

    def __init__(self, inner: Communicator, rate_mbit: float):
        super().__init__(inner.rank, inner.size, inner.device, ordered=True)
        self.inner, self.rate_mbit = inner, rate_mbit

    def duplicate(self) -> "Delayed":
        return Delayed(self.inner.duplicate(), self.rate_mbit)

    def _all_to_all(self, x: Tensor) -> Tensor:
        return self._slowly(self.inner.all_to_all, x, x.nbytes - x[0].nbytes)

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._slowly(self.inner.all_gather, x, (self.size - 1) * x.nbytes)

    def _all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("an ordered mean is made of the other two")

    def _slowly(self, collective, x: Tensor, nbytes: int) -> Tensor:
        due = time.perf_counter() + 8 * nbytes / (1e6 * self.rate_mbit)
        result = collective(x)
        time.sleep(max(due - time.perf_counter(), 0.0))
        return result


class Absent(Communicator):
    """No network: rank 0 of `size` ranks, whose messages all equal its own and take no time.

    It is for what a step costs without its exchange.

    Attributes:
        calls_made: what was asked for, (name of the collective, shape of its bytes), until it is
            cleared.
    """

    def __init__(self, size: int):
        super().__init__(rank=0, size=size)
        self.calls_made = []

    def duplicate(self) -> "Absent":
        return Absent(self.size)

    def _all_to_all(self, x: Tensor) -> Tensor:
        self.calls_made.append(("all_to_all", x.shape))
        return x[:1].repeat(self.size, 1)

    def _all_gather(self, x: Tensor) -> Tensor:
        self.calls_made.append(("all_gather", x.shape))
        return x.repeat(self.size, 1)

    def _all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("an ordered mean is made of the other two")


def replay(communicator: Communicator, calls: list[tuple[str, torch.Size]]):
    """A function that makes these collectives, of zeros, one after another."""
    buffers = [
        (getattr(communicator, name), torch.zeros(shape, dtype=torch.uint8))
        for name, shape in calls
    ]

    def exchange():
        for collective, x in buffers:
            collective(x)

    return exchange
