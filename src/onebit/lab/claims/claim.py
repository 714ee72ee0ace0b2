"""What a claim is, and the statistics that several papers' figures share."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path

import numpy as np
import pandas as pd

from onebit.lab.runs import measurements as measured
from onebit.lab.runs.load import load, paper_curve

TAIL = 0.1
Statistic = Callable[[pd.DataFrame], pd.Series]


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds and the interval around it."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Claim:
    """One claim of the paper.

    Attributes:
        name, statement, place: what is claimed, and where.
        experiment, profile: the runs that it is judged by.
        statistic: rows -> one number per seed, indexed by seed; or at once an Interval, of rows that are summaries themselves.
        accepts: the lowest and highest value with which the claim holds.
        rule: that range in words.
        detail: rows -> the same in the paper's own units.
        paper: the paper's number, read from results/paper.
        style: how the statistic is printed.
        folder: of results/, in which its rows are: runs, or theory or speed, whose measurements have no profile.
        read: (results/, profile) -> the rows, where they are not simply those of the experiment's runs.
    """

    name: str
    statement: str
    place: str
    experiment: str
    profile: str
    statistic: Statistic
    accepts: tuple[float, float]
    rule: str
    detail: Callable[[pd.DataFrame], str]
    paper: Callable[[], str]
    style: str
    folder: str = "runs"
    read: Callable[[Path, str], pd.DataFrame] | None = None


def rows_of(claim: Claim, root: Path) -> pd.DataFrame:
    """The rows that a claim is judged by."""
    if claim.read:
        return claim.read(root, claim.profile)
    if claim.folder == "runs":
        return load(root, claim.experiment, claim.profile)
    return measured.read(root, claim.folder, claim.experiment)[0]


def statistic_by_seed(claim: Claim, rows: pd.DataFrame) -> np.ndarray:
    """The claim's statistic as an array, one number per seed; empty if its runs are not there."""
    return claim.statistic(rows).to_numpy(dtype=float)


def tail_mean(rows: pd.DataFrame, optimizer: str, column: str) -> pd.Series:
    """Mean of a column over the last TAIL of the steps, by seed; of the runs that got there."""
    if column not in rows:  # nothing was evaluated
        return pd.Series(dtype=float)
    rows = rows[rows.optimizer == optimizer]
    return (
        rows[rows.step > (1 - TAIL) * rows.total_steps].groupby("seed")[column].mean().astype(float)
    )


def infinite_where_diverged(values: pd.Series, rows: pd.DataFrame, optimizer: str) -> pd.Series:
    """The same by seed, and infinite for each run that diverged."""
    for seed in rows[(rows.optimizer == optimizer) & (rows.status == "diverged")].seed.unique():
        values[seed] = inf
    return values


def relative_gap(
    final: Callable[[pd.DataFrame, str], pd.Series], optimizer: str, reference: str = "adam"
) -> Statistic:
    """(final - the reference's) / the reference's, by seed; none where the reference diverged, infinite where only the other did."""
    return lambda rows: (
        final(rows, optimizer) / final(rows, reference).replace(inf, nan) - 1
    ).dropna()


def of_finished(statistic: Statistic) -> Statistic:
    """The same over the runs that finished; infinite if none did."""

    def finite(rows: pd.DataFrame) -> pd.Series:
        values = statistic(rows)
        return values[np.isfinite(values)] if np.isfinite(values).any() else values

    return finite


def finished(rows: pd.DataFrame, optimizer: str) -> pd.DataFrame:
    """The rows of an optimizer's runs that finished."""
    return rows[(rows.optimizer == optimizer) & (rows.status == "finished")]


def paper_tails(figure: str, curve: str, reference: str = "Adam") -> list[float]:
    """Means of a curve of the paper and of the reference's over the last TAIL of the samples, or steps, that both have."""
    curves = [paper_curve(figure, name) for name in (curve, reference)]
    end = min(points.x.max() for points in curves)
    return [points.y[(points.x > (1 - TAIL) * end) & (points.x <= end)].mean() for points in curves]
