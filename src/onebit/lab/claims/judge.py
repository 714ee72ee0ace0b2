"""Judge every claim, and write the report: `python -m onebit.lab.claims.judge`."""

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

import pandas as pd

from onebit.lab.claims import CLAIMS, Claim, rows_of, statistic_by_seed
from onebit.lab.claims.statistics import (
    LEVEL,
    POWER,
    TAIL,
    Interval,
    least_detectable,
    mean_interval,
    prediction_interval,
)
from onebit.lab.runs.load import RESULTS, TUNING_SEED
from onebit.lab.runs.metadata import ROOT

FEWEST_SEEDS = 3
WORKSTATION_SEEDS = 5
# The profiles whose runs judge claims, the largest first. A claim names the smallest that can.
BY_SIZE = ("paper", "workstation", "laptop")
VERDICTS = ("reproduced", "partly", "not reproduced", "not judged", "needs a cluster")
# The claims that the README shows, whatever their verdict; all others are in results/CLAIMS.md.
HEADLINES = ("C1", "C4", "C8", "Z1", "L1", "S2")
# The claims whose rules were written after the runs or measurements that judge them.
WRITTEN_AFTER = ("S1", "S2", "S3", "F5", "F6", "C23")
MARKERS = "<!-- claims: written by make claims -->", "<!-- end of claims -->"


@dataclass(frozen=True)
class Judgement:
    """A claim, the interval of its statistic, and what follows from its rule.

    Attributes:
        beside: the same claim judged by the runs of other profiles.
    """

    claim: Claim
    interval: Interval
    verdict: str
    detail: str
    beside: "tuple[Judgement, ...]" = ()

    def ours(self) -> str:
        """The statistic with its interval, then the same result in the paper's own units."""
        return self.claim.shown(self.interval) + (f"; {self.detail}" if self.detail else "")

    def detectable(self) -> str:
        """The least detectable difference, which only an interval over seeds has."""
        if self.claim.folder == "speed":
            return ""
        difference = least_detectable(self.interval)
        return "" if isnan(difference) else self.claim.shown(difference).lstrip("+")

    def beside_text(self) -> str:
        """'laptop: partly, +1.0% [-1.0%, +3.0%], n = 3'; empty if there is nothing beside it.

        If a profile has another rule, it is told.
        """
        return "; ".join(
            f"{other.claim.profile}: {other.verdict}, {other.claim.shown(other.interval)}, "
            f"n = {other.interval.n}"
            + f" by another rule: {other.claim.rule}"
            * (other.claim.rule != self.claim.rule)
            for other in self.beside
        )


def verdict(
    interval: Interval, accepts: tuple[float, float], fewest_seeds: int = FEWEST_SEEDS
) -> str:
    """What a rule says of an interval; claims/__init__.py has the words."""
    low, high = accepts
    if interval.n < fewest_seeds:
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
    detail = claim.detail(rows) if interval.n else ""
    fewest = WORKSTATION_SEEDS if claim.profile == "workstation" else FEWEST_SEEDS
    return Judgement(claim, interval, verdict(interval, claim.accepts, fewest), detail)


def at_profiles(claim: Claim) -> list[Claim]:
    """The claim for each profile whose runs can judge it, the largest first."""
    if claim.profile not in BY_SIZE:
        return [claim]
    return [claim.at(profile) for profile in BY_SIZE[: BY_SIZE.index(claim.profile) + 1]]


def largest(judgements: list[Judgement]) -> Judgement:
    """The first of one claim's judgements that has enough seeds, or else the last.

    The others that have runs stand beside it.
    """
    judged = [one for one in judgements if one.verdict not in ("not judged", "needs a cluster")]
    chosen = (judged or judgements[-1:])[0]
    others = (one for one in judgements if one is not chosen and one.interval.n)
    return replace(chosen, beside=tuple(others))


def consistent(claim: Claim, committed: pd.DataFrame, live: pd.DataFrame) -> str:
    """Whether the live seed's statistic lies in the prediction interval of the committed seeds."""
    values, new = statistic_by_seed(claim, committed), statistic_by_seed(claim, live)
    if len(values) < FEWEST_SEEDS or not len(new):
        return "not judged"
    interval = prediction_interval(values)
    return "consistent" if interval.low <= new.mean() <= interval.high else "not consistent"


def judge_all(root: Path = RESULTS) -> list[Judgement]:
    """Judge every claim by what is committed. The rows of an experiment are read once."""
    read = {}
    judgements = []
    for claim in CLAIMS:
        found = []
        for one in at_profiles(claim):
            source = (one.name if one.read else one.folder, one.experiment, one.profile)
            if source not in read:
                read[source] = rows_of(one, root)
            found.append(judge(one, read[source]))
        judgements.append(largest(found))
    return judgements


# ---- the report


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    escaped = (
        [cell.replace("|", "\\|") for cell in line]
        for line in (header, ["---"] * len(header), *lines)
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def listed(names: tuple[str, ...]) -> str:
    """'S1, S2 and S3'."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


INTRODUCTION = f"""# Claims

`make claims` writes this file from `results/runs`, `results/theory` and `results/speed`; do not
edit it. The rules stand in `src/onebit/lab/claims`. They were written before the runs, except those
of {listed(WRITTEN_AFTER)}, which were written after them. Seed {TUNING_SEED} served to choose the
laptop's model sizes and learning rates, so it is left out.

How to read the table:

- A claim is judged by the runs of the largest profile that has enough of them: `workstation` needs
  {WORKSTATION_SEEDS} seeds, all others {FEWEST_SEEDS}. *Beside* are the verdicts of the others.
- *Detectable* is the least difference that a test at {1 - LEVEL:.0%} finds with a power of
  {POWER:.0%}, given n seeds that differ as these do.
- *Ours* is the mean over n seeds with its {LEVEL:.0%} t-interval, paired by seed. For S1 to S3 it
  is the median over n rounds with their 10th and 90th percentile.
- *Measured as* says what the number is and which direction is better. A number in % is a ratio: a
  difference relative to the reference, or a share. A number in points is a difference between two
  scores that are themselves in %. A number without a unit is a plain ratio or an exponent.
- The loss of a run is its mean training loss over the last {TAIL:.0%} of its steps; its test error
  is 100% less its mean accuracy there.
- A place without a paper's name is in the 1-bit Adam paper.
- A seed at which Adam diverged gives no number. An optimizer that is expected to fall behind is
  judged by its runs that finished, if any did.

The verdicts:

- *Reproduced*: the interval lies where the rule wants it.
- *Not reproduced*: the interval lies outside.
- *Partly*: the interval lies across the border.
- *Not judged*: there are too few seeds.
- *Needs a cluster*: only the paper's hardware can tell.
"""


def report(judgements: list[Judgement]) -> str:
    """The text of results/CLAIMS.md: the papers' claims, then those that no paper makes."""
    papers, beyond = ([j for j in judgements if j.claim.beyond is kind] for kind in (False, True))
    return (
        f"{INTRODUCTION}\n{counted(papers)}.\n\n{claims_table(papers)}\n\n"
        "## Beyond the papers\n\n"
        f"No paper makes these claims. {counted(beyond)}.\n\n{claims_table(beyond)}\n"
    )


def counted(judgements: list[Judgement]) -> str:
    """'Of 72 claims: 24 reproduced, 48 partly'."""
    counts = Counter(judgement.verdict for judgement in judgements)
    told = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    return f"Of {len(judgements)} claims: {told}"


def claims_table(judgements: list[Judgement]) -> str:
    """A row for each claim."""
    header = ["", "claim", "rule", "measured as", "paper", "ours", "n", "detectable"]
    header += ["runs", "verdict", "beside"]
    lines = [
        [
            judgement.claim.name,
            f"{judgement.claim.statement} ({judgement.claim.place})",
            judgement.claim.rule,
            judgement.claim.measures,
            judgement.claim.paper(),
            judgement.ours(),
            str(judgement.interval.n),
            judgement.detectable(),
            f"{judgement.claim.experiment}, {judgement.claim.profile}",
            f"**{judgement.verdict}**",
            judgement.beside_text(),
        ]
        for judgement in judgements
    ]
    return table(header, lines)


def summary(judgements: list[Judgement]) -> str:
    """What the README says: how many claims came out how, and a table of the HEADLINES."""
    papers = [judgement for judgement in judgements if not judgement.claim.beyond]
    beyond = len(judgements) - len(papers)
    after = [name for name in WRITTEN_AFTER if name in HEADLINES]
    lines = [
        [
            f"{judgement.claim.statement} ({judgement.claim.place})",
            judgement.claim.measures,
            judgement.claim.paper(),
            judgement.ours(),
            str(judgement.interval.n),
            judgement.verdict,
        ]
        for judgement in judgements
        if judgement.claim.name in HEADLINES
    ]
    header = ["claim", "measured as", "paper", "ours (95% interval)", "n", "verdict"]
    statements = " and ".join(
        f'"{judgement.claim.statement}"'
        for judgement in judgements
        if judgement.claim.name in after
    )
    return f"""\
{counted(papers)}.
Six of them:

{table(header, lines)}

[All {len(papers)} claims](results/CLAIMS.md), and {beyond} that no paper makes, with the rule for
each. The rules were written before the runs, except {len(WRITTEN_AFTER)} that are named there; of
the six above it is that of {statements}."""


def with_summary(readme: str, judgements: list[Judgement]) -> str:
    """The README with the table between its two markers replaced."""
    start, end = MARKERS
    before, _, rest = readme.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(
            f"README.md needs the lines {start} and {end}, between which the table goes."
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
            f"{claim.name:4} {judgement.verdict:16} {claim.shown(judgement.interval)}  "
            f"{claim.statement}"
        )
    print("results/CLAIMS.md and the table in README.md are written.")


if __name__ == "__main__":
    main()
