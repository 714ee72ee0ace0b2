"""What a claim is: a statement of a paper, the statistic that tests it, and the rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from onebit.lab.claims.statistics import Interval, Statistic
from onebit.lab.runs import measurements
from onebit.lab.runs.load import load


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper.

    Attributes:
        name: its number in results/CLAIMS.md, such as C1.
        statement: what is claimed.
        place: where the paper claims it.
        experiment: the experiment whose runs judge it.
        profile: the profile of these runs; "measured" for rows of results/theory and results/speed.
        statistic: rows -> one number per seed, indexed by seed; or at once an Interval, of rows
            that are summaries themselves.
        measures: what the statistic is, in which unit, and which direction is better.
        accepts: the lowest and highest value with which the claim holds.
        rule: that range in words.
        detail: rows -> the same result in the paper's own units.
        paper: the paper's number, read from results/paper.
        style: the format in which the statistic is printed.
        points: the statistic is a difference of scores that are themselves in %, so that its
            hundredths are printed as points.
        folder: the folder of results/ with its rows: runs, theory or speed.
        read: (results/, profile) -> the rows, where they are not those of the experiment's runs.
        at_workstation: the fields that another rule for the profile workstation changes.
        beyond: no paper makes this claim; it is counted apart.
    """

    name: str
    statement: str
    place: str
    experiment: str
    profile: str
    statistic: Statistic | Callable[[pd.DataFrame], Interval]
    measures: str
    accepts: tuple[float, float]
    rule: str
    paper: Callable[[], str]
    style: str
    detail: Callable[[pd.DataFrame], str] = lambda rows: ""
    points: bool = False
    folder: str = "runs"
    read: Callable[[Path, str], pd.DataFrame] | None = None
    at_workstation: Mapping[str, Any] = field(default_factory=dict)
    beyond: bool = False

    def at(self, profile: str) -> "Claim":
        """The claim as it is judged by runs of another profile."""
        changed = self.at_workstation if profile == "workstation" else {}
        return replace(self, profile=profile, **changed)

    def shown(self, value: float | Interval) -> str:
        """A value of the statistic, or its interval, as the report prints it."""
        text = value.shown(self.style) if isinstance(value, Interval) else f"{value:{self.style}}"
        return in_points(text) if self.points else text


def in_points(text: str) -> str:
    """'+1.3% [-2.0%, +4.5%]' as points of a score: '+1.3 points [-2.0, +4.5]'."""
    first, *rest = text.split("%")
    return first + " points" + "".join(rest) if rest else text


def rows_of(claim: Claim, root: Path) -> pd.DataFrame:
    """The rows that a claim is judged by."""
    if claim.read:
        return claim.read(root, claim.profile)
    if claim.folder == "runs":
        return load(root, claim.experiment, claim.profile)
    return measurements.read(root, claim.folder, claim.experiment)[0]


def statistic_by_seed(claim: Claim, rows: pd.DataFrame) -> np.ndarray:
    """The claim's statistic as an array, one number per seed; empty if its runs are not there."""
    return claim.statistic(rows).to_numpy(dtype=float)
