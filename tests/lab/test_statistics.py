"""Means, intervals and verdicts."""

from math import inf, nan

import numpy as np
import pytest

from onebit.lab.claims.bert import MARGIN
from onebit.lab.claims.judge import verdict
from onebit.lab.claims.statistics import FLOOR, Interval, mean_interval, prediction_interval


def test_mean_interval_is_students():
    # mean 2, s = 1, n = 3, t_{0.975, 2} = 4.302653
    interval = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.high - 2 == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert 2 - interval.low == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


def test_prediction_interval_is_students_and_never_narrower_than_the_floor():
    interval = prediction_interval(np.array([1.0, 2.0, 3.0]))
    assert interval.high - 2 == pytest.approx(4.302653 * (4 / 3) ** 0.5, rel=1e-6)
    same = prediction_interval(np.array([1.0, 1.0, 1.0]))
    assert (same.low, same.high) == (1 - FLOOR, 1 + FLOOR)


def test_mean_interval_holds_the_mean_in_95_of_100_samples():
    samples = np.random.default_rng(0).normal(size=(4000, 3))
    held = [interval.low <= 0 <= interval.high for interval in map(mean_interval, samples)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_verdict_of_an_equivalence():
    for low, high, n, expected in (
        (-0.01, 0.02, 3, "reproduced"),
        (-0.01, 0.04, 3, "partly"),
        (-0.05, 0.05, 3, "partly"),
        (0.031, 0.04, 3, "not reproduced"),
        (-0.06, -0.04, 3, "not reproduced"),
        (-0.01, 0.02, 2, "not judged"),
        (inf, inf, 3, "not reproduced"),
    ):
        interval = Interval((low + high) / 2, low, high, n)
        assert verdict(interval, (-MARGIN, MARGIN)) == expected, interval


def test_a_mean_that_is_not_defined_is_never_reproduced():
    assert verdict(Interval(nan, nan, nan, 3), (-MARGIN, MARGIN)) != "reproduced"
