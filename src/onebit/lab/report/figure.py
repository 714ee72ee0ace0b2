"""What all figures share: panels, curves with their spread, the paper's panel, the legend, files.

A figure has two columns of panels, so that it can be read at the width of a page's text, and one
legend above them, which covers no data.
"""

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullFormatter

from onebit.lab.report.content import fingerprint
from onebit.lab.report.style import LOOKS, PAPER_NAMES, POINTS, look
from onebit.lab.runs.load import paper_curve, paper_curves

COLUMNS = 2
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.framealpha": 0.8,
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    "legend.handlelength": 3.5,
}
Rows = pd.DataFrame


# ---- panels


def canvas(panels: int, columns: int = COLUMNS) -> tuple[Drawing, list[Axes]]:
    """A drawing with this many panels, and the panels in reading order."""
    plt.rcParams.update(STYLE)
    rows = -(-panels // columns)
    drawing, axes = plt.subplots(
        rows, columns, figsize=(3.9 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    for unused in axes.flat[panels:]:
        unused.remove()
    return drawing, list(axes.flat[:panels])


def legend(drawing: Drawing, *panels: Axes, columns: int = COLUMNS) -> None:
    """One legend above all panels, of what these (by default all) label, each label once."""
    found = {}
    for axes in panels or drawing.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    drawing.legend(
        list(found.values()), list(found), loc="outside upper center", ncols=columns, frameon=False
    )


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis; with numbers between its powers of ten if it has hardly one."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def volume_axis(axes: Axes) -> None:
    """A logarithmic x axis of megabytes that a worker has sent."""
    axes.set(xlabel="bytes sent by a worker (MB, log scale)", xscale="log")
    low, high = axes.get_xlim()
    subs = (1, 2, 3, 5) if high < 30 * low else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def mark_freeze(axes: Axes, x: float, steps: float, of: str = "") -> None:
    """A vertical line at T_w. The label of the x axis, which must be there, says what it is."""
    axes.axvline(x, color="0.4", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.set_xlabel(f"{axes.get_xlabel()}; dashed: $T_w${of} = {steps:,.0f}")


def freeze_step(rows: Rows) -> int:
    """T_w of the 1-bit Adam runs."""
    return int(rows[rows.optimizer == "onebit_adam"].warmup_steps.iloc[0])


# ---- curves


def curve(rows: Rows, x: str, y: str, points: int = POINTS) -> Rows:
    """The curve of one optimizer, in `points` blocks of steps.

    Columns: x, and the mean, lowest and highest seed of y. Steps at which y is not defined are left
    out.
    """
    rows = rows.dropna(subset=[y])
    block = ((rows.step - 1) * points // rows.total_steps).rename("block")
    seeds = rows.groupby([block, "seed"])[[x, y]].mean()
    blocks = seeds.groupby("block")
    return pd.DataFrame(
        {
            "x": blocks[x].mean(),
            "mean": blocks[y].mean(),
            "low": blocks[y].min(),
            "high": blocks[y].max(),
        }
    )


def draw_curve(axes: Axes, line: Rows, x_scale: float, style: dict) -> None:
    """The mean as a line, and a band from the lowest to the highest seed."""
    axes.plot(line.x / x_scale, line["mean"], **style)
    band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
    axes.fill_between(line.x / x_scale, line.low, line.high, **band)


def draw(axes: Axes, rows: Rows, x: str, y: str, x_scale: float = 1.0) -> None:
    """One line and band per optimizer against x / x_scale, of the runs that finished.

    A live run is a thin line over them. A run that diverged is a thin line up to where it leaves
    the range of those that finished.
    """
    shown = within_range(rows.dropna(subset=[y]), y)
    for optimizer in [name for name in LOOKS if name in set(rows.optimizer)]:
        of_optimizer = rows.optimizer == optimizer
        committed = rows[of_optimizer & ~rows.live.astype(bool)]
        live = rows[of_optimizer & rows.live.astype(bool)]
        if len(committed):
            label = f"{LOOKS[optimizer][0]}, {seeds_text(committed)}"
            line = curve(committed[committed.status == "finished"], x, y)
            draw_curve(axes, line, x_scale, look(optimizer, label))
        diverged = shown[(shown.status == "diverged") & ~shown.live.astype(bool)]
        for _, run in diverged[diverged.optimizer == optimizer].groupby("seed"):
            draw_thin(axes, curve(run, x, y), x_scale, look(optimizer, None))
        if len(live):
            label = None if len(committed) else f"{LOOKS[optimizer][0]}, live"
            own = shown[(shown.optimizer == optimizer) & shown.live.astype(bool)]
            draw_thin(axes, curve(own, x, y), x_scale, look(optimizer, label))
    live = rows[rows.live.astype(bool)]
    if len(live):
        label = f"thin: live, seed {live.seed.iloc[0]}"
        axes.plot([], [], color="0.3", linewidth=0.7, label=label)


def draw_thin(axes: Axes, line: Rows, x_scale: float, style: dict) -> None:
    """One run as a thin line."""
    axes.plot(line.x / x_scale, line["mean"], **{**style, "linewidth": 0.7, "markersize": 2})


def draw_diverged(axes: Axes, rows: Rows, x: str, y: float, x_scale: float) -> None:
    """A cross at the height y where each committed run that diverged ended.

    Crosses of different optimizers differ in size, so that none hides another.
    """
    ended = rows[(rows.status == "diverged") & ~rows.live.astype(bool)]
    for i, (optimizer, runs) in enumerate(ended.groupby("optimizer")):
        ends = runs.groupby("seed")[x].last() / x_scale
        cross = {"color": LOOKS[optimizer][1], "marker": "x", "linestyle": "none"}
        axes.plot(ends, [y] * len(ends), markersize=14 / (1 + i), markeredgewidth=2, **cross)


def within_range(rows: Rows, y: str) -> Rows:
    """The rows without those of diverged runs from where they leave the range of finished runs.

    That is where y exceeds all that finished runs have, or is not finite.
    """
    highest = rows[rows.status == "finished"][y].max()
    beyond = (rows.status == "diverged") & ~(
        (rows[y] <= highest) | (np.isnan(highest) & np.isfinite(rows[y]))
    )
    return rows[~beyond.groupby([rows.live, rows.optimizer, rows.seed]).cummax()]


def seeds_text(rows: Rows) -> str:
    """'n = 3 seeds', 'n = 2 seeds, 1 of 3 diverged' or 'all 3 seeds diverged'."""
    seeds, finished = rows.seed.nunique(), rows[rows.status == "finished"].seed.nunique()
    if not finished:
        return f"all {seeds} seeds diverged" if seeds > 1 else "diverged"
    diverged = f", {seeds - finished} of {seeds} diverged" if finished < seeds else ""
    return f"n = {finished} seed{'s' * (finished != 1)}{diverged}"


def draw_paper(axes: Axes, name: str, curves: tuple[str, ...]) -> None:
    """The paper's digitised curves, each in the look of its optimizer."""
    for paper_name in sorted(curves, key=lambda curve: list(LOOKS).index(PAPER_NAMES[curve])):
        points = paper_curve(name, paper_name)
        optimizer = PAPER_NAMES[paper_name]
        axes.plot(points.x, points.y, **look(optimizer, f"{LOOKS[optimizer][0]} (paper)"))


# ---- panels that several figures have


def loss_by_samples(axes: Axes, rows: Rows, title: str = "Ours", y: str = "loss") -> None:
    """A loss against samples."""
    draw(axes, rows, "samples", y, x_scale=1e3)
    axes.set(title=title, xlabel="samples (thousands)", ylabel=loss_label(y))


def loss_by_volume(axes: Axes, rows: Rows, y: str = "loss") -> None:
    """A loss against the bytes that a worker has sent."""
    draw(axes, rows, "bytes_sent", y, x_scale=1e6)
    axes.set(title="Ours, by volume", ylabel=loss_label(y))
    volume_axis(axes)


def loss_label(column: str) -> str:
    return {"loss": "training loss", "validation_loss": "validation loss"}[column]


def loss_and_accuracy(rows: Rows, number: int, chance: float) -> Drawing:
    """Training loss and test accuracy against samples: ours above, the paper's Figure below.

    chance: the accuracy, in %, at which a run that diverged is marked.
    """
    drawing, axes = canvas(4)
    drawn = (("a", "loss", "training loss"), ("b", "test_accuracy", "test accuracy (%)"))
    for ours, papers, (part, y, label) in zip(axes[:2], axes[2:], drawn, strict=True):
        draw(ours, rows, "samples", y, x_scale=1e3)
        ours.set(title=f"Ours: {label}", xlabel="samples (thousands)", ylabel=label)
        draw_paper(papers, f"fig{number}{part}", paper_curves(f"fig{number}{part}"))
        papers.set(
            title=f"The paper's Figure {number}{part}", xlabel="samples (millions)", ylabel=label
        )
    draw_diverged(axes[1], rows, "samples", chance, x_scale=1e3)
    for losses in (axes[0], axes[2]):
        log_scale(losses)
    legend(drawing, axes[0])
    return drawing


# ---- files


def write(drawing: Drawing, text: str, path: Path) -> Path:
    """The figure over its caption, as path.png and .pdf; returns the former.

    Both carry the fingerprint of what is drawn. They carry no dates, so that the same CSV gives the
    same files.
    """
    add_caption(drawing, text)
    mark = fingerprint(drawing)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(
        path.with_suffix(".png"),
        dpi=150,
        bbox_inches="tight",
        metadata={"Software": None, "Description": mark},
    )
    drawing.savefig(
        path.with_suffix(".pdf"),
        bbox_inches="tight",
        metadata={"CreationDate": None, "ModDate": None, "Subject": mark},
    )
    plt.close(drawing)
    return path.with_suffix(".png")


def add_caption(drawing: Drawing, text: str) -> None:
    """The caption below the panels."""
    wrapped = textwrap.wrap(text, int(15.5 * drawing.get_figwidth()))
    drawing.text(0.01, -0.01, "\n".join(wrapped), va="top", fontsize=8, color="0.25")
