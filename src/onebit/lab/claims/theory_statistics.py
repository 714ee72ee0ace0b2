"""Statistics of the rows of results/theory: exponents, and values at the end, by seed."""

import numpy as np
import pandas as pd

from onebit.lab.bench.theory import SPEEDUP_PROBLEM, SPEEDUP_WORKERS
from onebit.lab.claims.statistics import Interval, mean_interval

Rows = pd.DataFrame


def exponents(rows: Rows, along: str, value: str = "error") -> pd.Series:
    """The slope of log(value) against log(along) by least squares, for each seed."""
    return rows.groupby("seed").apply(
        lambda own: np.polyfit(np.log(own[along]), np.log(own[value]), 1)[0], include_groups=False
    )


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a number in common."""
    return max(one.low, other.low) <= min(one.high, other.high)


# ---- error_feedback.csv


def chosen(rows: Rows, part: str, setting: str, quantity: str) -> Rows:
    """Step, seed and value of one quantity of error_feedback.csv."""
    found = rows[
        (rows.part == part)
        & (rows.setting.astype(str) == str(setting))
        & (rows.quantity == quantity)
    ]
    return found[["step", "seed", "value"]]


def final(rows: Rows, part: str, setting: str, quantity: str) -> pd.Series:
    """The value of a quantity at the last step, by seed."""
    found = chosen(rows, part, setting, quantity)
    return found[found.step == found.step.max()].set_index("seed").value


def late_exponents(rows: Rows, part: str, setting: str, quantity: str) -> pd.Series:
    """The power of t with which a quantity grows from T / 10 to T, by seed."""
    found = chosen(rows, part, setting, quantity)
    return exponents(found[found.step >= found.step.max() / 10], "step", "value")


def quadratic_share(rows: Rows) -> pd.Series:
    """The sum of (delta_{t-1} - delta_t)^2 over the sum of g_t^2, by seed."""
    return final(rows, "terms", "naive", "quadratic") / final(
        rows, "terms", "naive", "squared gradient"
    )


# ---- linear_speedup.csv


def bound_terms(rows: Rows) -> np.ndarray:
    """The three terms of Corollary 1's bound without constants, [rows, 3]."""
    n, T, eps = (rows[column].to_numpy(float) for column in ("workers", "steps", "eps"))
    noise = SPEEDUP_PROBLEM.sigma / np.sqrt(n * T)
    return np.stack([noise, eps ** (2 / 3) / T ** (2 / 3), 1 / T], axis=1)


def along_axis(rows: Rows, method: str, along: str) -> Rows:
    """The rows of a method along one axis, with the corollary's `bound`.

    They vary the workers at the largest T, or the steps T at SPEEDUP_WORKERS workers.
    """
    fixed = rows.workers == SPEEDUP_WORKERS if along == "steps" else rows.steps == rows.steps.max()
    found = rows[(rows.method == method) & fixed]
    return found.assign(bound=bound_terms(found).sum(1))


def exponent(rows: Rows, method: str, along: str, value: str = "error") -> Interval:
    """The interval over the seeds of the exponent of a value along an axis."""
    return mean_interval(exponents(along_axis(rows, method, along), along, value).to_numpy())
