"""The statistics that claims, figures, tables and notebooks share: of runs by seed, and intervals.

A statistic maps the rows of an experiment's runs to one number per seed. Two optimizers are
compared seed by seed, since a seed fixes the initial weights and the order of the data.

The loss of a run is its mean training loss over the last TAIL of its steps. A run that diverged has
an infinite loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, isfinite, nan, sqrt

import numpy as np
import pandas as pd
from pandas.api.typing import SeriesGroupBy
from scipy import stats

from onebit.lab.runs.load import by_tensor, paper_curve, paper_number

TAIL = 0.1
LEVEL = 0.95
POWER = 0.8
# Another CPU rounds differently, which is not another result. All statistics are ratios to 1, so
# one floor serves them all.
FLOOR = 0.005
# Tensors that LAMB's figure and claims leave out: the bias of the two classes of next-sentence
# prediction, which the paper calls unstable, and the biases of the keys, whose gradient is zero but
# for rounding, since they change all scores of a query alike.
UNSTEADY_TENSORS = ("seq_relationship.bias", "key.bias")

Rows = pd.DataFrame
Statistic = Callable[[Rows], pd.Series]


# ---- intervals


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds and the interval around it."""

    mean: float
    low: float
    high: float
    n: int

    def shown(self, style: str) -> str:
        """The mean and, where there is one, its interval, each in this format."""
        if not self.n:
            return "no runs"
        if self.n == 1 or not isfinite(self.mean):
            return f"{self.mean:{style}}"
        return f"{self.mean:{style}} [{self.low:{style}}, {self.high:{style}}]"


def mean_interval(values: np.ndarray) -> Interval:
    """mean +- t_{0.975, n-1} s / sqrt(n), the LEVEL interval of the mean.

    A mean that is infinite, because a run diverged, is its own interval.
    """
    return _t_interval(values, variance_factor=1 / max(len(values), 1))


def least_detectable(interval: Interval) -> float:
    """The difference that a two-sided test at 1 - LEVEL finds with a power of POWER.

    (t_{0.975, n-1} + t_{0.8, n-1}) s / sqrt(n), with s / sqrt(n) from the interval's half-width;
    nan for fewer than two seeds.
    """
    if interval.n < 2 or not isfinite(interval.mean):
        return nan
    half = (interval.high - interval.low) / 2
    two_sided, power = (stats.t.ppf(p, interval.n - 1) for p in ((1 + LEVEL) / 2, POWER))
    return half * (1 + power / two_sided)


def prediction_interval(values: np.ndarray) -> Interval:
    """Where one more seed falls: mean +- max(t_{0.975, n-1} s sqrt(1 + 1/n), FLOOR)."""
    interval = _t_interval(values, variance_factor=1 + 1 / max(len(values), 1))
    return Interval(
        interval.mean,
        min(interval.low, interval.mean - FLOOR),
        max(interval.high, interval.mean + FLOOR),
        interval.n,
    )


def _t_interval(values: np.ndarray, variance_factor: float) -> Interval:
    n = len(values)
    mean = float(np.mean(values)) if n else nan
    if not isfinite(mean):
        return Interval(mean, mean, mean, n)
    if n == 1:
        return Interval(mean, -inf, inf, n)
    half = (
        stats.t.ppf((1 + LEVEL) / 2, n - 1) * float(np.std(values, ddof=1)) * sqrt(variance_factor)
    )
    return Interval(mean, mean - half, mean + half, n)


# ---- runs of one optimizer


def finished(rows: Rows, optimizer: str) -> Rows:
    """The rows of an optimizer's runs that finished."""
    return rows[(rows.optimizer == optimizer) & (rows.status == "finished")]


def diverged(rows: Rows, optimizer: str) -> int:
    """How many runs of an optimizer diverged."""
    return rows[(rows.optimizer == optimizer) & (rows.status == "diverged")].seed.nunique()


def tail_mean(rows: Rows, optimizer: str, column: str) -> pd.Series:
    """The mean of a column over the last TAIL of the steps, by seed, of the runs that got there."""
    return _of_tail(rows, optimizer, column, TAIL).mean().astype(float)


def _of_tail(rows: Rows, optimizer: str, column: str, share: float) -> SeriesGroupBy:
    """A column over the last `share` of the steps, grouped by seed; empty if it is not there."""
    rows = rows[(rows.optimizer == optimizer) & (rows.step > (1 - share) * rows.total_steps)]
    return rows.reindex(columns=["seed", column]).astype(float).dropna().groupby("seed")[column]


def tail_median(rows: Rows, optimizer: str, column: str, share: float) -> pd.Series:
    """The median of a column over the last `share` of the steps, by seed; see `tail_mean`."""
    return _of_tail(rows, optimizer, column, share).median().astype(float)


def infinite_where_diverged(values: pd.Series, rows: Rows, optimizer: str) -> pd.Series:
    """The same values by seed, and infinity for each run that diverged."""
    for seed in rows[(rows.optimizer == optimizer) & (rows.status == "diverged")].seed.unique():
        values[seed] = inf
    return values


def final_loss(rows: Rows, optimizer: str) -> pd.Series:
    """The mean training loss over the last TAIL of the steps, by seed; infinite if it diverged."""
    return infinite_where_diverged(tail_mean(rows, optimizer, "loss"), rows, optimizer)


def final_score(rows: Rows, optimizer: str, metric: str) -> pd.Series:
    """The metric after the last step, in %, by seed, of the runs that finished."""
    if metric not in rows:  # nothing was evaluated
        return pd.Series(dtype=float)
    rows = finished(rows, optimizer)
    return rows[rows.step == rows.total_steps].set_index("seed")[metric].dropna().astype(float)


# ---- one optimizer against another


def relative_gap(
    final: Callable[[Rows, str], pd.Series], optimizer: str, reference: str = "adam"
) -> Statistic:
    """(final - the reference's final) / the reference's final, by seed.

    A seed at which the reference diverged gives no number; one at which only the other optimizer
    diverged gives infinity.
    """
    return lambda rows: (
        final(rows, optimizer) / final(rows, reference).replace(inf, nan) - 1
    ).dropna()


def loss_gap(optimizer: str, reference: str = "adam") -> Statistic:
    """The difference of the loss from the reference's, relative to it, by seed."""
    return relative_gap(final_loss, optimizer, reference)


def log_ratio(gap: Statistic) -> Statistic:
    """The logarithm of the ratio 1 + gap, by seed, for ratios with heavy tails."""
    return lambda rows: np.log1p(gap(rows))


def of_finished(statistic: Statistic) -> Statistic:
    """The same statistic over the runs that finished; infinite if none did."""

    def finite(rows: Rows) -> pd.Series:
        values = statistic(rows)
        return values[np.isfinite(values)] if np.isfinite(values).any() else values

    return finite


def ratio_by_seed(
    rows: Rows, column: str, exact: str = "adam", compressed: str = "onebit_adam"
) -> pd.Series:
    """One optimizer's total over the other's, over the seeds at which both finished."""
    one, other = (
        finished(rows, name).groupby("seed")[column].max().astype(float)
        for name in (exact, compressed)
    )
    return (one / other).dropna()


def saved(column: str) -> Statistic:
    """The share of 1-bit Adam's total that 0/1 Adam does without, by seed."""
    return lambda rows: 1 - 1 / ratio_by_seed(rows, column, "onebit_adam", "zero_one_adam")


def volume_share(warmup_share: float, bits: int = 32) -> float:
    """w + (1 - w) / bits: 1-bit Adam's volume as a share of Adam's, w = T_w / T the warm-up's."""
    return warmup_share + (1 - warmup_share) / bits


# ---- the variance


def chosen_by_rule(run: Rows, begin: int, first: int) -> float:
    """The step at which the rule of Section 7.1 ends a warm-up that starts at `begin`.

    It is the first recorded step, counted from `begin` and not before `first`, at which the run's
    variance has settled; infinity if it never does.
    """
    low = paper_number("auto_rule_threshold")
    ratio = run.variance_ratio.astype(float)
    steps = run.step[(run.step >= begin + first) & (ratio >= low) & (ratio <= 1 / low)]
    return float(steps.iloc[0] - begin) if len(steps) else inf


def lr_warmup(phase: dict) -> int:
    """The steps of a run's phase, as in run.json, in which the learning rate rises."""
    return ceil(phase["lr"]["warmup"] / phase["lr"]["stretch"])


def by_steady_tensor(rows: Rows, quantity: str) -> Rows:
    """The columns of a quantity, named by tensor, without UNSTEADY_TENSORS."""
    columns = by_tensor(rows, quantity)
    return columns[[name for name in columns if not name.endswith(UNSTEADY_TENSORS)]]


# ---- curves of the papers


def paper_tails(figure: str, curve: str, reference: str = "Adam") -> list[float]:
    """Means of two curves of the paper over the last TAIL of what both have on the x axis."""
    curves = [paper_curve(figure, name) for name in (curve, reference)]
    end = min(points.x.max() for points in curves)
    return [points.y[(points.x > (1 - TAIL) * end) & (points.x <= end)].mean() for points in curves]
