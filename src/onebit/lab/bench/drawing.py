"""How measurements are drawn: curves with their spread, sizes, and acceptance bars."""

import pandas as pd
from matplotlib.axes import Axes

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


def size_text(n: int) -> str:
    """65536 -> "64K", 16777216 -> "16M"; other sizes in millions: 16162304 -> "15.4M"."""
    if n < M:
        return f"{n / 2**10:.4g}K"
    return f"{n // M}M" if n % M == 0 else f"{n / M:.1f}M"


def draw(
    axes: Axes, rows: pd.DataFrame, look: int, label: str, y: str, low: str, high: str
) -> None:
    """One curve with its spread against the size."""
    rows = rows.sort_values("n")
    colour, line, marker = LOOKS[look]
    style = {"color": colour, "linestyle": line, "marker": marker}
    axes.plot(rows.n, rows[y], markersize=4, linewidth=1.5, label=label, **style)
    axes.fill_between(rows.n, rows[low], rows[high], color=colour, alpha=0.2, linewidth=0)


def draw_seeds(
    axes: Axes,
    rows: pd.DataFrame,
    along: str,
    value: str,
    label: str,
    look: tuple[str, str, str],
    size: float = 4,
) -> None:
    """The mean over the seeds as a line, lowest to highest seed as a band."""
    colour, line, marker = look
    found = rows.groupby(along)[value].agg(["mean", "min", "max"])
    style = {"color": colour, "linestyle": line, "marker": marker}
    axes.plot(found.index, found["mean"], markersize=size, linewidth=1.5, label=label, **style)
    axes.fill_between(found.index, found["min"], found["max"], color=colour, alpha=0.2, linewidth=0)


def draw_bar(axes: Axes, n: int, value: float, look: int) -> None:
    """The value that a curve must be under at the size n."""
    colour = LOOKS[look][0]
    style = {"color": colour, "linewidth": 2.5, "solid_capstyle": "butt", "zorder": 5}
    axes.plot([n / 1.5, n * 1.5], [value, value], **style)
    arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (n, value * 0.88), (n, value), arrowprops=arrow)


def size_axis(axes: Axes, sizes: list[int]) -> None:
    """A logarithmic x axis of sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), [size_text(n) for n in sorted(sizes)])
    axes.minorticks_off()
    axes.set_xlabel("elements")


def plain_ticks(axes: Axes, values: tuple[float, ...]) -> None:
    """A logarithmic y axis with these numbers beside it, as far as they are in its range."""
    low, high = axes.get_ylim()
    axes.set_yticks([value for value in values if low <= value <= high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
