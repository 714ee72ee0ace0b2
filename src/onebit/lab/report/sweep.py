"""The drawing of a sweep: 1-bit Adam with one option varied, as a difference from Adam."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from onebit.lab.claims.bert import MARGIN
from onebit.lab.claims.statistics import finished, loss_gap, mean_interval
from onebit.lab.report import figure as figures
from onebit.lab.report.style import LOOKS, POINTS
from onebit.lab.report.style import look as known_look
from onebit.lab.runs.load import at_common_seeds

LINES, MARKERS = ("-", "--", "-.", ":"), "vP<X>d"
Rows = pd.DataFrame


def look(optimizer: str, labels: dict[str, str], label: str | None) -> dict:
    """The look of an optimizer that other figures show too is theirs.

    The rest goes from light to dark, which print shows as well.
    """
    if optimizer in LOOKS:
        return known_look(optimizer, label)
    own = [name for name in labels if name not in LOOKS]
    i = own.index(optimizer)
    return {
        "color": matplotlib.colormaps["cividis"](0.9 * (1 - i / max(len(own) - 1, 1))),
        "linestyle": LINES[i % len(LINES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markevery": 0.15,
        "markersize": 4,
        "linewidth": 1.2,
        "label": label,
    }


def plot(rows: Rows, labels: dict[str, str], option: str) -> figures.Drawing:
    """The loss's difference from Adam's: by samples, by variant and, where it varies, by volume.

    Args:
        rows: of committed runs.
        labels: what the figure calls each variant, by method.
        option: what varies.
    """
    if rows.live.any():
        raise ValueError("A sweep is drawn from committed runs only: leave --live out.")
    rows = at_common_seeds(rows, ("adam", *labels))
    volumes = {name: megabytes(rows, name) for name in labels}
    by_volume_differs = len({round(volume, 2) for volume in volumes.values()}) > 1
    drawing, (curves, gaps, *by_volume) = figures.canvas(2 + by_volume_differs)
    for name, label in {"adam": "Adam", **labels}.items():
        draw_gap_curve(curves, rows, name, look(name, labels, label))
    curves.set(title="During training", xlabel="samples (thousands)", ylabel="loss, against Adam's")
    for i, name in enumerate(labels):
        draw_gaps(gaps, i, rows, name, labels)
        for axes in by_volume:
            draw_gaps(axes, volumes[name], rows, name, labels)
    gaps.set_xticks(range(len(labels)), list(labels.values()), rotation=20, ha="right")
    gaps.set(title="At the end", xlabel=option, ylabel="loss, against Adam's")
    for axes in by_volume:
        axes.set(title="At the end, by volume", ylabel="loss, against Adam's")
        figures.volume_axis(axes)
    for axes in (curves, gaps, *by_volume):
        axes.axhspan(-MARGIN, MARGIN, color="0.9", zorder=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figures.legend(drawing, curves)
    return drawing


def megabytes(rows: Rows, optimizer: str) -> float:
    """What a worker has sent in a whole run, in MB; nan if none finished."""
    return finished(rows, optimizer).bytes_sent.max() / 1e6


def gap_curve(rows: Rows, optimizer: str, points: int = POINTS) -> Rows:
    """The loss of an optimizer against Adam's, in blocks of steps, over the seeds of finished runs.

    Columns: x in samples, and the mean, lowest and highest of loss / Adam's loss - 1.
    """
    adam, own = (finished(rows, name) for name in ("adam", optimizer))
    losses = [
        run.groupby([((run.step - 1) * points // run.total_steps).rename("block"), "seed"])[
            ["samples", "loss"]
        ].mean()
        for run in (adam, own)
    ]
    gap = (losses[1].loss / losses[0].loss - 1).dropna().groupby("block")
    x = losses[1].samples.groupby("block").mean()
    return pd.DataFrame({"x": x, "mean": gap.mean(), "low": gap.min(), "high": gap.max()})


def draw_gap_curve(axes: Axes, rows: Rows, optimizer: str, style: dict) -> None:
    """The curve of one variant; the legend says how many of its seeds finished."""
    chosen = rows[rows.optimizer == optimizer]
    if len(chosen):
        label = f"{style['label']}, {figures.seeds_text(chosen)}"
        figures.draw_curve(axes, gap_curve(rows, optimizer), 1e3, {**style, "label": label})


def draw_gaps(axes: Axes, x: float, rows: Rows, optimizer: str, labels: dict[str, str]) -> None:
    """A small dot for each seed that finished with both, the mean and its interval beside them."""
    values = loss_gap(optimizer)(rows)
    values = values[np.isfinite(values)].to_numpy()
    if not len(values) or np.isnan(x):
        return
    own = look(optimizer, labels, None)
    interval = mean_interval(values)
    axes.plot([x] * len(values), values, ".", color=own["color"], markersize=4, alpha=0.7)
    bar = (
        [[interval.mean - interval.low], [interval.high - interval.mean]]
        if len(values) > 1
        else None
    )
    axes.errorbar(
        x,
        interval.mean,
        yerr=bar,
        color=own["color"],
        marker=own["marker"],
        markersize=7,
        capsize=4,
    )
