"""When freezing the variance fails: the final loss against how v grew after the freeze.

The papers have no such figure. It reads every committed run that freezes its variance: Figures 4, 6
and 8, Table 3, the sweep over T_w, and 0/1 Adam's.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter

from onebit.lab.claims.bert import MARGIN
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main
from onebit.lab.report.freezing import (
    CLIPPED,
    ENOUGH_MEMORIES,
    HARMLESS_GROWTH,
    FreezingFigure,
)

LOOKS = {
    "BERT": ("#0072B2", "o"),
    "GPT-2": ("#009E73", "s"),
    "ResNet": ("#E69F00", "^"),
    "DCGAN": ("#CC79A7", "D"),
    "SQuAD": ("#D55E00", "v"),
    "SST-2": ("#56B4E9", "P"),
    "STS-B": ("#000000", "X"),
}
HIGHEST = 1.5  # where a run that diverged is drawn


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """The gap against the growth of v; and the growth against what v averages."""
    drawing, (gaps, both) = figures.canvas(2)
    draw_gaps(gaps, rows)
    draw_both(both, rows[~rows.clipped])
    figures.legend(drawing, columns=4)
    return drawing


def points(axes: Axes, rows: pd.DataFrame, x: str, y: str, fill: str, labelled: bool) -> None:
    """A point for each run, in the look of its task."""
    for task, (colour, marker) in LOOKS.items():
        chosen = rows[rows.task == task]
        if len(chosen):
            axes.plot(
                chosen[x],
                chosen[y].clip(upper=HIGHEST) if y == "gap" else chosen[y],
                linestyle="none",
                color=colour,
                marker=marker,
                markersize=5,
                fillstyle=fill,
                label=task if labelled else None,
            )


def draw_gaps(axes: Axes, rows: pd.DataFrame) -> None:
    """The final loss against the growth; linear within MARGIN and logarithmic beyond."""
    points(axes, rows[~rows.clipped], "growth", "gap", "full", labelled=True)
    points(axes, rows[rows.clipped], "growth", "gap", "none", labelled=True)
    axes.axhspan(-MARGIN, MARGIN, color="0.9", zorder=0)
    axes.axvline(HARMLESS_GROWTH, color="0.4", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.set_yscale("symlog", linthresh=MARGIN)
    axes.set_yticks([-MARGIN, 0, MARGIN, 0.1, 0.3, 1.0])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    axes.yaxis.set_minor_formatter("")
    axes.set(
        title="Does the variance go on growing?",
        xlabel=r"growth of $\|v\|_1$ after the freeze",
        ylabel="final loss, against Adam's",
        ylim=(-0.04, HIGHEST),
    )
    plain(axes.xaxis, "x", axes)


def draw_both(axes: Axes, rows: pd.DataFrame) -> None:
    """The growth against the updates that v averages; filled: more than MARGIN above Adam."""
    points(axes, rows[rows.gap > MARGIN], "memories", "growth", "full", labelled=False)
    points(axes, rows[rows.gap <= MARGIN], "memories", "growth", "none", labelled=False)
    axes.axhline(HARMLESS_GROWTH, color="0.4", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.axvline(ENOUGH_MEMORIES, color="0.4", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.set(
        title=f"Filled: loss more than {MARGIN:.0%} above Adam's",
        xlabel=r"updates of $v$ before the freeze, over $1/(1-\beta_2)$",
        ylabel=r"growth of $\|v\|_1$ after it",
        yscale="log",
    )
    plain(axes.xaxis, "x", axes)
    plain(axes.yaxis, "y", axes)


def plain(axis: Axis, which: str, axes: Axes) -> None:
    """A logarithmic axis with plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    low, high = axis.get_view_interval()
    ticks = [x for x in (0.5, 0.7, 1, 2, 3, 5, 10, 20, 30) if low <= x <= high]
    axis.set_ticks(ticks, labels=[f"{x:g}" for x in ticks])
    axis.set_minor_formatter("")


ARTIFACT = FreezingFigure(
    name="figure_freezing",
    title="When freezing the variance fails",
    plot=plot,
    note=(
        "A point is a committed run of 1-bit Adam, of its uncompressed variant, with any T_w, or "
        "of 0/1 Adam. Growth: the largest mean of Adam's own ||v||_1 over a tenth of the run, "
        "after the step at which the run froze its variance, over its value there, at the same "
        "seed. Hollow in the first panel: the norm of the gradient reaches "
        f"{CLIPPED:.0%} of its limit, so that clipping holds ||v||_1 and its growth says nothing; "
        f"these runs are not in the second panel. Dashed: a growth of {HARMLESS_GROWTH:g}, and "
        f"{ENOUGH_MEMORIES:g} times the variance's memory. "
        f"Grey: what claim C1 counts as no difference (±{MARGIN:.0%} of the loss). The papers do "
        "not show this."
    ),
)

if __name__ == "__main__":
    main(ARTIFACT)
