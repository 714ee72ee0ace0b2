"""Times that can be compared on a machine that others use too.

Contenders run in turn in one process, so that each ratio is between neighbours in time. Medians and
percentiles describe them. Rounds in which other processes took the CPU are dropped and repeated.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

FOREIGN_LIMIT = 0.06  # the share of all CPU time that other processes may take in rounds that count
STRETCH = 0.5  # seconds; over less, Linux's counts of 10 ms a CPU say nothing about a share of 6 %
# At most so many rounds are dropped for each that is wanted; further disturbed ones are kept and
# counted.
DROPS_PER_ROUND = 3
LOW, HIGH = 10, 90  # percentiles that stand for the spread


class Alone:
    """One process measures. A list of numbers is its own sum and maximum."""

    def start(self) -> None:
        """Called before each sample."""

    def sum(self, values: list[float]) -> list[float]:
        return values

    max = sum


class InStep:
    """All ranks of torch.distributed's default group measure the same contenders together.

    A sample starts on all ranks at once.
    """

    def start(self) -> None:
        dist.barrier()

    def sum(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], how: dist.ReduceOp) -> list[float]:
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, how)
        return reduced.tolist()


class Guard:
    """The share of the CPUs that went to processes that do not measure, from `start` to `share`.

    It is 0 where there is no /proc/stat. The kernel's own work on interrupts does not count as
    another process, since our messages cause it.
    """

    def __init__(self, pace: Alone | InStep):
        self.pace = pace

    def start(self) -> None:
        self.before = self._now()

    def share(self) -> float:
        busy, own, wall = (now - then for now, then in zip(self._now(), self.before))
        busy, wall = self.pace.max([busy, wall])
        (own,) = self.pace.sum([own])
        return max(busy - own, 0.0) / (wall * os.cpu_count())

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """CPU seconds of all processes, CPU seconds of this process, and the time.

        The first includes what other machines on the same host took.
        """
        return _busy_seconds(), time.process_time(), time.perf_counter()


def _busy_seconds() -> float:
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(
        int, path.read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Timings:
    """What `alternate` found.

    Attributes:
        seconds: for each contender, one number a round.
        dropped: rounds that were thrown away since they were disturbed.
        disturbed: rounds that were kept although they were.
    """

    seconds: dict[str, np.ndarray]
    dropped: int
    disturbed: int

    def ratios(self, name: str, rival: str) -> np.ndarray:
        """Time of `name` / time of `rival`, round by round."""
        return self.seconds[name] / self.seconds[rival]

    def summary(self, name: str, rival: str) -> dict:
        """A row of a CSV.

        It has the median and spread of the time; `ratio`, the ratio of the medians; and
        `round_ratio`, `ratio_low` and `ratio_high`, the median and spread of the rounds' own
        ratios. `ratio` can lie outside the spread, since it is not the median of the rounds'
        ratios.
        """
        seconds, ratios = self.seconds[name], self.ratios(name, rival)
        ratio = np.median(seconds) / np.median(self.seconds[rival])
        return {
            "rounds": len(seconds),
            "dropped": self.dropped,
            "disturbed": self.disturbed,
            **spread("ms", 1e3 * seconds),
            "ratio_to": rival,
            "ratio": float(ratio),
            "ratio_low": float(np.percentile(ratios, LOW)),
            "ratio_high": float(np.percentile(ratios, HIGH)),
            "round_ratio": float(np.median(ratios)),
        }


def spread(unit: str, values: np.ndarray) -> dict:
    """{"median_ms", "low_ms", "high_ms"} for the unit "ms"."""
    low, median, high = np.percentile(values, (LOW, 50, HIGH))
    return {f"median_{unit}": float(median), f"low_{unit}": float(low), f"high_{unit}": float(high)}


def alternate(
    contenders: dict[str, Callable],
    rounds: int,
    *,
    warmup: int = 2,
    pace: Alone | InStep | None = None,
    guard: Guard | None = None,
) -> Timings:
    """Call all contenders in turn, once a round, each round beginning with another one.

    No contender finds its data in the cache only because it ran just before, as long as contenders
    that are compared share none.

    Args:
        contenders: name -> what is timed.
        rounds: at least so many count; they come in stretches of at least STRETCH seconds, and a
            disturbed stretch is repeated.
        warmup: rounds before, the last of which tells how long a round takes.
        pace: `InStep` if several ranks measure together; a time is then the slowest rank's.
        guard: tells how disturbed a stretch was.
    """
    pace = pace or Alone()
    guard = guard or Guard(pace)
    kept, dropped, disturbed, turn = [], 0, 0, warmup
    with _without_garbage_collection():
        for i in range(warmup):
            seconds = _round(contenders, i, pace)
        stretch = max(math.ceil(STRETCH / sum(seconds.values())), 1)
        while len(kept) < rounds:
            guard.start()
            taken = [_round(contenders, turn + i, pace) for i in range(stretch)]
            turn += stretch
            is_disturbed = guard.share() > FOREIGN_LIMIT
            if is_disturbed and dropped < DROPS_PER_ROUND * rounds:
                dropped += stretch
                continue
            disturbed += stretch * is_disturbed
            kept += taken
    return Timings(
        {name: np.array([seconds[name] for seconds in kept]) for name in contenders},
        dropped,
        disturbed,
    )


def _round(contenders: dict[str, Callable], turn: int, pace: Alone | InStep) -> dict[str, float]:
    """Seconds that each contender took, in the order of `contenders`, not that of running."""
    names = list(contenders)
    first = turn % len(names)
    seconds = {}
    for name in names[first:] + names[:first]:
        call = contenders[name]
        pace.start()
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    return dict(zip(names, pace.max([seconds[name] for name in names])))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """It would strike whichever contender happens to run."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
