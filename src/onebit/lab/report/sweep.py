"""What the sweeps share: 1-bit Adam with one option varied, on the task of Figure 4. The papers have nothing like it, so nothing is judged.

A sweep is a file experiments/sweep_NAME.py: as a figure, and VARIANTS says how each optimizer but Adam is called there, in order.
"""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from onebit.lab.claims.bert import MARGIN, loss_gap
from onebit.lab.claims.claim import TAIL
from onebit.lab.claims.judge import LEVEL, mean_interval
from onebit.lab.report import figure as figures
from onebit.lab.report.captions import describe
from onebit.lab.report.style import LOOKS
from onebit.lab.runs.load import at_common_seeds

LINES, MARKERS = ("-", "--", "-.", ":"), "vP<X>d"


def look(optimizer: str, variants: dict[str, str], label: str | None) -> dict:
    """As in every figure, for an optimizer that others show too; the rest from light to dark, which print shows as well."""
    if optimizer in LOOKS:
        return figures.look(optimizer, label)
    own = [name for name in variants if name not in LOOKS]
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


def plot(rows: pd.DataFrame, variants: dict[str, str], option: str) -> Figure:
    """The loss against samples, then the last TAIL's difference from Adam's by variant and, where it is not one and the same, by volume."""
    if rows.live.any():
        raise ValueError("a sweep is drawn from committed runs only: leave --live out")
    rows = at_common_seeds(rows, ("adam", *variants))
    volumes = {name: megabytes(rows, name) for name in variants}
    apart = len({round(volume, 2) for volume in volumes.values()}) > 1
    drawing, (curves, gaps, *by_volume) = figures.figure(columns=2 + apart)
    for name, label in {"adam": "Adam", **variants}.items():
        chosen = rows[rows.optimizer == name]
        if len(chosen):
            line = figures.curve(chosen[chosen.status == "finished"], "samples", "loss")
            own = look(name, variants, f"{label}, {figures.seeds_text(chosen)}")
            curves.plot(line.x / 1e3, line["mean"], **own)
            curves.fill_between(
                line.x / 1e3, line.low, line.high, color=own["color"], alpha=0.2, linewidth=0
            )
    curves.set(xlabel="samples (thousands)", ylabel="training loss")
    curves.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        fontsize=7,
        handlelength=3,
        columnspacing=1,
        borderpad=0,
    )
    for i, name in enumerate(variants):
        draw_gaps(gaps, i, rows, name, variants)
        for axes in by_volume:
            draw_gaps(axes, volumes[name], rows, name, variants)
    gaps.set_xticks(range(len(variants)), list(variants.values()), rotation=20, ha="right")
    gaps.set(xlabel=option, ylabel="loss, against Adam's")
    for axes in by_volume:
        axes.set(xlabel="bytes sent by a worker (MB, log scale)", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    for axes in (gaps, *by_volume):
        axes.axhspan(-MARGIN, MARGIN, color="0.9", zorder=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return drawing


def megabytes(rows: pd.DataFrame, optimizer: str) -> float:
    """Sent by a worker in a whole run; nan if none finished."""
    return rows[(rows.optimizer == optimizer) & (rows.status == "finished")].bytes_sent.max() / 1e6


def draw_gaps(
    axes: Axes, x: float, rows: pd.DataFrame, optimizer: str, variants: dict[str, str]
) -> None:
    """A small dot for each seed that finished with both, the mean and its interval beside them."""
    values = loss_gap(optimizer)(rows)
    values = values[np.isfinite(values)].to_numpy()
    if not len(values) or np.isnan(x):
        return
    own = look(optimizer, variants, None)
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


def caption(rows: pd.DataFrame, records: list[dict]) -> str:
    """What was run and what is shown."""
    first = records[0]
    return (
        f"Seeds that all have run. Left: their mean, band: lowest to highest. Beside it: the mean loss of the last {TAIL:.0%} of "
        f"the steps, its difference from Adam's, paired by seed; a dot is a seed, the bar the mean with its {LEVEL:.0%} interval, grey what claim "
        f"C1 counts as no difference (±{MARGIN:.0%}). Runs that diverged are counted in the legend only. Profile {first['profile']}: "
        f"{describe(first)}, {first['config']['batch']:,} samples a step, {first['total_steps']:,} steps; all but the option shown as in "
        f"Figure 4. The papers do not show this."
    )
