"""Bars: acceptance rules of the speed experiments, written before their measurements."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from onebit.lab.bench.drawing import size_text


@dataclass(frozen=True)
class Bar:
    """An acceptance rule: in one row, a ratio of times is at most a number.

    Attributes:
        contender: what was timed.
        column: "ratio", of the medians, or "times_limit", the same ratio as a multiple of what the
            memory's bandwidth allows.
        at_most: the number.
        where: column -> value, which tell the contender's row.
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


def check_bars(bars: tuple[Bar, ...], rows: pd.DataFrame) -> pd.DataFrame:
    """One line a bar: the ratio of the medians, the bar, and whether it holds.

    The spread is that of the ratios of single rounds, so that the ratio of the medians may lie a
    little outside.
    """
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
        lines.append({"what": bar.contender, "where": where_text(bar), "to": rival(bar, row)})
        lines[-1] |= {**found, "bar": bar.at_most}
    return pd.DataFrame(lines, columns=["what", "where", "to", "ratio", "spread", "bar", "holds"])


def rival(bar: Bar, row: pd.Series | None) -> str:
    """What the ratio compares with."""
    if bar.column == "times_limit":
        return "the bandwidth limit"
    return "" if row is None else row.ratio_to


def where_text(bar: Bar) -> str:
    """'n=16M, threads=2'."""
    return ", ".join(
        f"{name}={size_text(value) if name == 'n' else value}" for name, value in bar.where.items()
    )
