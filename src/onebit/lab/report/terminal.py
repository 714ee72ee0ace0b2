"""Tables for the terminal, among them the claims that some runs speak to."""

import textwrap
from pathlib import Path

from onebit.lab.claims import CLAIMS, statistic_by_seed
from onebit.lab.claims.claim import Claim
from onebit.lab.claims.judge import consistent, judge
from onebit.lab.runs.load import load


def text_table(header: list[str], lines: list[list[str]], widths: list[int]) -> str:
    """A table as text. A cell that is wider than its column is wrapped."""
    out = []
    for line in (header, *lines):
        cells = [
            textwrap.wrap(cell, width) or [""] for cell, width in zip(line, widths, strict=True)
        ]
        for i in range(max(map(len, cells))):
            parts = [
                (cell[i] if i < len(cell) else "").ljust(width)
                for cell, width in zip(cells, widths, strict=True)
            ]
            out.append("  ".join(parts).rstrip())
        out.append("-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(out)


def verdicts(experiments: set[str], profile: str, results: Path, live: Path | None = None) -> str:
    """The claims that runs of these experiments speak to, as a table.

    Each line has the paper's number, and our interval and verdict from the runs under `results`.
    With `live`, it also has the statistic of the runs there, and whether that is consistent with
    the interval.
    """
    lines = [
        _verdict(claim, profile, results, live)
        for claim in CLAIMS
        if claim.experiment in experiments and claim.profile == profile
    ]
    if not lines:
        return f"No claim is judged at profile {profile}."
    header = ["claim", "the paper", "ours [95% interval]", "verdict"]
    widths = [30, 20, 22, 14]
    if live:
        header, widths = [*header, "this run", "this run and ours"], [*widths, 22, 14]
    return text_table(header, lines, widths)


def _verdict(claim: Claim, profile: str, results: Path, live: Path | None) -> list[str]:
    committed = load(results, claim.experiment, profile)
    judgement = judge(claim, committed)
    ours = f"{claim.shown(judgement.interval)}, n = {judgement.interval.n}"
    line = [f"{claim.name} {claim.statement}", claim.paper(), ours, judgement.verdict]
    if live is None:
        return line
    rows = load(live, claim.experiment, profile)
    value = statistic_by_seed(claim, rows)
    said = f"{claim.shown(value.mean())}; {claim.detail(rows)}" if len(value) else "no run"
    return [*line, said, consistent(claim, committed, rows)]
