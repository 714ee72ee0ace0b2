"""Judging claims from rows: intervals, verdicts, and the report (`python -m onebit.lab.claims.judge`)."""

import argparse
from collections import Counter
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from onebit.lab.claims import CLAIMS, TAIL, Claim, Interval, rows_of, statistic_by_seed
from onebit.lab.runs.load import RESULTS, TUNING_SEED
from onebit.lab.runs.metadata import ROOT

LEVEL = 0.95
FEWEST_SEEDS = 3
VERDICTS = ("reproduced", "partly", "not reproduced", "not judged", "needs a cluster")
DID_NOT = VERDICTS[1:3]
HEADLINES = (
    "C1",
    "C3",
    "C4",
    "C8",
    "C20",
    "T1",
    "Z1",
    "Z2",
    "Z3",
    "L1",
    "L2",
    "F5",
    "S2",
)  # what the README shows, whatever the verdict
# Another CPU rounds differently, which is no other result. All statistics are ratios to 1, so one floor does.
FLOOR = 0.005


@dataclass(frozen=True)
class Judgement:
    """A claim, the interval of its statistic, and what follows from its rule."""

    claim: Claim
    interval: Interval
    verdict: str
    detail: str


def mean_interval(values: np.ndarray) -> Interval:
    """mean +- t_{0.975, n-1} s / sqrt(n). A mean that is infinite, because a run diverged, is its own interval."""
    return _t_interval(values, variance_factor=1 / max(len(values), 1))


def prediction_interval(values: np.ndarray) -> Interval:
    """Where one more seed falls: mean +- max(t_{0.975, n-1} s sqrt(1 + 1/n), FLOOR)."""
    interval = _t_interval(values, variance_factor=1 + 1 / max(len(values), 1))
    return Interval(
        interval.mean,
        min(interval.low, interval.mean - FLOOR),
        max(interval.high, interval.mean + FLOOR),
        interval.n,
    )


def _t_interval(values, variance_factor):
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


def verdict(interval: Interval, accepts: tuple[float, float]) -> str:
    """What the rule says of an interval; claims/__init__.py has the words."""
    low, high = accepts
    if interval.n < FEWEST_SEEDS:
        return "not judged"
    if low <= interval.low and interval.high <= high:
        return "reproduced"
    if interval.high < low or interval.low > high:
        return "not reproduced"
    return "partly"


def judge(claim: Claim, rows: pd.DataFrame) -> Judgement:
    """Apply the claim's rule to the rows of its experiment and profile."""
    found = claim.statistic(rows)
    interval = found if isinstance(found, Interval) else mean_interval(found.to_numpy(dtype=float))
    if claim.profile == "paper" and not interval.n:
        return Judgement(claim, interval, "needs a cluster", "")
    return Judgement(
        claim, interval, verdict(interval, claim.accepts), claim.detail(rows) if interval.n else ""
    )


def consistent(claim: Claim, committed: pd.DataFrame, live: pd.DataFrame) -> str:
    """Whether the live seed's statistic lies in the prediction interval of the committed seeds."""
    values, new = statistic_by_seed(claim, committed), statistic_by_seed(claim, live)
    if len(values) < FEWEST_SEEDS or not len(new):
        return "not judged"
    interval = prediction_interval(values)
    return "consistent" if interval.low <= new.mean() <= interval.high else "not consistent"


def judge_all(root: Path = RESULTS) -> list[Judgement]:
    """Every claim, from what is committed."""
    return [judge(claim, rows_of(claim, root)) for claim in CLAIMS]


def show(interval: Interval, style: str) -> str:
    """The mean and its interval, as the claim prints them."""
    if not interval.n:
        return "no runs"
    if interval.n == 1 or not isfinite(interval.mean):
        return f"{interval.mean:{style}}"
    return f"{interval.mean:{style}} [{interval.low:{style}}, {interval.high:{style}}]"


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    escaped = (
        [cell.replace("|", "\\|") for cell in line]
        for line in (header, ["---"] * len(header), *lines)
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def report(judgements: list[Judgement]) -> str:
    """results/CLAIMS.md."""
    lines = []
    for judgement in judgements:
        claim = judgement.claim
        ours = show(judgement.interval, claim.style) + (
            f"; {judgement.detail}" if judgement.detail else ""
        )
        lines.append(
            [
                claim.name,
                f"{claim.statement} ({claim.place})",
                claim.rule,
                claim.paper(),
                ours,
                str(judgement.interval.n),
                f"{claim.experiment}, {claim.profile}",
                f"**{judgement.verdict}**",
            ]
        )
    return "\n".join(
        [
            "# Claims",
            "",
            "Written by `make claims` from `results/runs`, `results/theory` and `results/speed`; do not edit.",
            "The rules stand in `src/onebit/lab/claims`, written before the runs; those of S1 to S3, F5, F6 and C23 after them.",
            f"Seed {TUNING_SEED} served to choose the laptop's model sizes and learning rates; it is left out.",
            "",
            f"Ours: the mean over n seeds with its {LEVEL:.0%} t-interval, paired by seed.",
            f"The loss of a run is the mean training loss over the last {TAIL:.0%} of its steps, its test error 100% less the mean accuracy there.",
            "A place without a paper's name is in the 1-bit Adam paper.",
            "Of S1 to S3: the median over n rounds, and in brackets their 10th and 90th percentile.",
            "A seed at which Adam diverged gives no number. What is to fall behind is judged by the runs that finished, if any did.",
            "",
            "*Reproduced*: the interval lies where the rule wants it. *Not reproduced*: it lies outside. *Partly*: it lies across the border.",
            f"*Not judged*: fewer than {FEWEST_SEEDS} seeds. *Needs a cluster*: only the paper's hardware can tell.",
            "",
            table(["", "claim", "rule", "paper", "ours", "n", "runs", "verdict"], lines),
            "",
        ]
    )


def summary(judgements: list[Judgement]) -> str:
    """What the README says: how many claims came out how, then a table of the main ones and of all that did not come out."""
    counts = Counter(j.verdict for j in judgements)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    shown = [j for j in judgements if j.claim.name in HEADLINES or j.verdict in DID_NOT]
    lines = [
        [
            f"{j.claim.statement} ({j.claim.place})",
            j.claim.paper(),
            show(j.interval, j.claim.style) + (f"; {j.detail}" if j.detail else ""),
            str(j.interval.n),
            j.verdict,
        ]
        for j in shown
    ]
    return (
        f"Of {len(judgements)} claims: {told}. The main ones, and all that did not come out, or not quite:\n\n"
        + table(["claim", "paper", "ours (95% interval)", "n", "verdict"], lines)
    )


def with_summary(readme: str, judgements: list[Judgement]) -> str:
    """The README with the table between its two markers replaced."""
    start, end = "<!-- claims: written by make claims -->", "<!-- end of claims -->"
    before, _, rest = readme.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(
            f"README.md needs the lines {start} and {end}, between which the table goes"
        )
    return f"{before}{start}\n{summary(judgements)}\n{end}{after}"


def main() -> None:
    """Write results/CLAIMS.md and the table in README.md, and print the verdicts."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    judgements = judge_all()
    (RESULTS / "CLAIMS.md").write_text(report(judgements), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(
        with_summary(readme.read_text(encoding="utf-8"), judgements), encoding="utf-8"
    )
    for judgement in judgements:
        claim = judgement.claim
        print(
            f"{claim.name}  {judgement.verdict:16} {show(judgement.interval, claim.style)}  {claim.statement}"
        )
    print("results/CLAIMS.md and the table in README.md are written.")


if __name__ == "__main__":
    main()
