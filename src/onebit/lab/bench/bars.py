"""What the speed experiments share beside timing: their files, the bars that a ratio must keep under, figures, the command line.

results/speed/<name>.csv has the rows of `Timings.summary`, each with what was timed; `measured` has the rest of files and command line.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onebit.lab.bench.timing import FOREIGN_LIMIT, HIGH, LOW
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements as measured

M = 2**20
SIZES = tuple(k * 2**10 for k in (64, 256, 1024, 4096, 16384, 65536))  # elements
# Okabe and Ito's palette, with line styles and markers: a curve is known without its colour.
LOOKS = (
    ("#D55E00", "-", "s"),
    ("#0072B2", "--", "o"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#E69F00", "-", "v"),
    ("#56B4E9", "--", "P"),
    ("#000000", ":", "X"),
)


@dataclass(frozen=True)
class Bar:
    """An acceptance rule: in the row of `contender` at which `where` holds, `column` is at most `at_most`.

    column: "ratio", of the medians, or "times_limit", the same ratio as a multiple of what the memory's bandwidth allows.
    """

    contender: str
    column: str
    at_most: float
    where: dict = field(default_factory=dict)

    def row(self, rows: pd.DataFrame) -> pd.Series | None:
        """The row that it is about; None if that was not measured."""
        chosen = rows[rows.contender == self.contender]
        for column, value in self.where.items():
            chosen = chosen[chosen[column] == value]
        assert len(chosen) <= 1, f"{self} is about more than one row"
        return chosen.iloc[0] if len(chosen) else None


def judge(bars: tuple[Bar, ...], rows: pd.DataFrame) -> pd.DataFrame:
    """One line a bar: what was found, its spread over the rounds, the bar, whether it holds."""
    lines = []
    for bar in bars:
        row = bar.row(rows)
        found = {"ratio": np.nan, "spread": "", "holds": "not measured"}
        if row is not None:
            value, low, high = row[bar.column], row[f"{bar.column}_low"], row[f"{bar.column}_high"]
            found = {
                "ratio": value,
                "spread": f"{low:.3f} to {high:.3f}",
                "holds": "yes" if value <= bar.at_most else "NO",
            }
        to = (
            "the bandwidth limit"
            if bar.column == "times_limit"
            else row.ratio_to
            if row is not None
            else ""
        )
        where = ", ".join(
            f"{name}={size_text(value) if name == 'n' else value}"
            for name, value in bar.where.items()
        )
        lines.append({"what": bar.contender, "where": where, "to": to, **found, "bar": bar.at_most})
    return pd.DataFrame(lines, columns=["what", "where", "to", "ratio", "spread", "bar", "holds"])


# ---- files


def write(root: Path, name: str, rows: list[dict], config: dict, **facts) -> None:
    """speed/<name>.csv and .json under `root`. config: options of the run, with its seed."""
    guard = {
        "foreign_limit": FOREIGN_LIMIT,
        "spread": f"percentiles {LOW} and {HIGH} of the rounds",
    }
    measured.write(root, "speed", name, rows, config, **guard, **facts)


def read(root: Path, name: str) -> tuple[pd.DataFrame, dict]:
    """(the rows, what the JSON says). FileNotFoundError with the remedy if there are none."""
    return measured.read(root, "speed", name)


# ---- figures


def size_text(n: int) -> str:
    """65536 -> "64K", 16777216 -> "16M"; sizes that are no multiple in millions: 16162304 -> "15.4M"."""
    if n < M:
        return f"{n / 2**10:.4g}K"
    return f"{n // M}M" if n % M == 0 else f"{n / M:.1f}M"


def draw(
    axes: Axes, rows: pd.DataFrame, look: int, label: str, y: str, low: str, high: str
) -> None:
    """One curve with its spread against the size."""
    rows = rows.sort_values("n")
    colour, line, marker = LOOKS[look]
    axes.plot(
        rows.n,
        rows[y],
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=4,
        linewidth=1.5,
        label=label,
    )
    axes.fill_between(rows.n, rows[low], rows[high], color=colour, alpha=0.2, linewidth=0)


def draw_bar(axes: Axes, n: int, value: float, look: int) -> None:
    """What a curve must be under at the size n."""
    axes.plot(
        [n / 1.5, n * 1.5],
        [value, value],
        color=LOOKS[look][0],
        linewidth=2.5,
        solid_capstyle="butt",
        zorder=5,
    )
    axes.annotate(
        "",
        (n, value * 0.88),
        (n, value),
        arrowprops={"arrowstyle": "-|>", "color": LOOKS[look][0], "shrinkA": 0, "shrinkB": 0},
    )


def size_axis(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), [size_text(n) for n in sorted(sizes)])
    axes.minorticks_off()
    axes.set_xlabel("elements")


def plain_ticks(axes: Axes, values: tuple[float, ...]) -> None:
    """A logarithmic axis with these numbers beside it, as far as they are in its range."""
    low, high = axes.get_ylim()
    axes.set_yticks([value for value in values if low <= value <= high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def caption(rows: pd.DataFrame, facts: dict) -> str:
    """How it was measured, from the files."""
    host, rounds = facts["machine"], sorted({int(rows.rounds.min()), int(rows.rounds.max())})
    disturbed = int(rows.disturbed.max())
    return (
        f"Line or point: median of {' to '.join(map(str, rounds))} rounds, in each of which all contenders run in turn; band or whisker: {LOW}th to "
        f"{HIGH}th percentile. Rounds in which other processes took more than {facts['foreign_limit']:.0%} of the CPU were dropped and repeated "
        f"(at most {int(rows.dropped.max())} for a setting{f'; up to {disturbed} had to be kept' if disturbed else ''}). "
        f"{host['cpu']}, family {host['cpu_family']} model {host['cpu_model']}, {host['cores']} cores, {host['memory_gb']:g} GB; Python "
        f"{host['python']}, torch {host['torch']}, numba {host['numba']}; commit {facts['commit'][:7]}"
        f"{' with changes' if 'dirty' in facts['commit'] else ''}, {facts['date'][:10]}."
    )


# ---- the command line


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Options that all speed experiments have."""
    made = measured.parser(description)
    made.add_argument(
        "--rounds",
        type=measured.positive(int),
        default=rounds,
        help="rounds that count, in each setting",
    )
    made.add_argument("--seed", type=int, default=1)
    return made


def conclude(
    name: str,
    root: Path,
    plot: Callable[[pd.DataFrame], Figure],
    bars: tuple[Bar, ...] = (),
    note: str = "",
) -> None:
    """Print the table of the bars and draw the figure, from the files. note: what the caption says beside how it was measured."""
    try:
        rows, facts = read(root, name)
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    if bars:
        print(judge(bars, rows).to_string(index=False, float_format="%.3f"))
    print(
        figures.write(
            plot(rows), f"{note} {caption(rows, facts)}".strip(), Path(root) / "figures" / name
        )
    )
