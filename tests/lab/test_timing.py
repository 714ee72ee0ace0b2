"""Contenders take turns, disturbed rounds are dropped, and ranks in step have the slowest one's
time.
"""

import os
import time

import numpy as np
import pytest
from helpers.launch import BACKENDS

from onebit.lab.bench.timing import (
    DROPS_PER_ROUND,
    FOREIGN_LIMIT,
    Guard,
    InStep,
    Timings,
    alternate,
)


class FakeGuard:
    """Says of each stretch what it is told to; the last word again and again."""

    def __init__(self, *shares):
        self.shares = list(shares)

    def start(self):
        pass

    def share(self):
        return self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]


@pytest.fixture
def stretches_of_one_round(monkeypatch):
    monkeypatch.setattr("onebit.lab.bench.timing.STRETCH", 0.0)


def test_contenders_run_in_turn_and_each_round_begins_with_another(stretches_of_one_round):
    calls = []
    alternate(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        4,
        warmup=2,
        guard=FakeGuard(0.0),
    )
    assert "".join(calls) == "abcbca" + "cababcbcacab"


def test_a_time_goes_to_the_contender_that_took_it():
    timings = alternate(
        {"slow": lambda: time.sleep(0.02), "quick": lambda: None}, 2, guard=FakeGuard(0.0)
    )
    assert timings.seconds["slow"].min() >= 0.02 > timings.seconds["quick"].max()
    assert len(timings.seconds["slow"]) == len(timings.seconds["quick"])


def test_ratios_are_those_of_the_rounds_and_the_bar_is_about_the_medians():
    seconds = {"a": np.array([1.0, 2.0, 30.0]), "b": np.array([1.0, 4.0, 5.0])}
    row = Timings(seconds, dropped=7, disturbed=0).summary("a", "b")
    assert row["ratio"] == 2 / 4 and row["round_ratio"] == 1.0
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx(
        tuple(np.percentile([1.0, 0.5, 6.0], (10, 90)))
    )
    assert (row["rounds"], row["dropped"], row["median_ms"], row["ratio_to"]) == (3, 7, 2000.0, "b")


def test_a_disturbed_round_is_dropped_repeated_and_counted(stretches_of_one_round):
    timings = alternate({"a": lambda: None}, 3, guard=FakeGuard(0.0, 1.0, 1.0, FOREIGN_LIMIT))
    assert (len(timings.seconds["a"]), timings.dropped, timings.disturbed) == (3, 2, 0)


def test_a_machine_that_is_never_quiet_is_said_to_be_so(stretches_of_one_round):
    timings = alternate({"a": lambda: None}, 2, guard=FakeGuard(1.0))
    assert (len(timings.seconds["a"]), timings.dropped, timings.disturbed) == (
        2,
        2 * DROPS_PER_ROUND,
        2,
    )


def test_the_guards_share_is_that_of_other_processes(monkeypatch):
    guard = Guard(pace=type("", (), {"max": staticmethod(list), "sum": staticmethod(list)}))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Guard, "_now", staticmethod(lambda: (10.0, 1.0, 100.0)))
    guard.start()
    monkeypatch.setattr(Guard, "_now", staticmethod(lambda: (13.0, 2.0, 102.0)))
    assert guard.share() == (3 - 1) / (2 * 4)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="no /proc/stat")
def test_own_work_counts_as_ours_and_as_the_machines():
    before = Guard._now()
    while time.process_time() < before[1] + 0.3:
        pass
    busy, own, wall = (now - then for now, then in zip(Guard._now(), before))
    assert own >= 0.3 and wall >= 0.3 and busy >= 0.25  # the kernel counts in 10 ms


def together(communicator):
    contenders = {"a": lambda: time.sleep(0.02 * communicator.rank), "b": lambda: None}
    return alternate(contenders, 2, pace=InStep()).seconds


def test_ranks_in_step_all_have_the_slowest_ones_time():
    one, two = BACKENDS["gloo"](2, together)
    for name in "ab":
        assert np.array_equal(one[name], two[name])
    assert one["a"].min() >= 0.02
