"""Figure 2: the variance norm of Adam settles, and T_w comes after it has. Reads the runs of Figure 4."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures
from onebit.lab.runs.load import paper_curve, paper_number

EXPERIMENT = "figure_04"
OPTIMIZERS = ("adam", "onebit_adam")


def plot(rows: pd.DataFrame) -> Figure:
    """Above the norm, below its ratio over one window of 1/(1 - beta2) steps; ours and the paper's Figure 2."""
    drawing, (norm, paper_norm, ratio, paper_ratio) = figures.figure(columns=2, rows=2)
    figures.draw(norm, rows, "step", "variance_l2")
    norm.set(title="Ours", xlabel="step", ylabel=r"$\|v_t\|_2$", yscale="log")
    figures.draw(ratio, rows[rows.optimizer == "adam"], "step", "variance_ratio")
    ratio.set(xlabel="step", ylabel=r"$\|v_t\|_1\,/\,\|v_{t-1/(1-\beta_2)}\|_1$")
    figures.draw_paper(paper_norm, "fig2", ("variance norm (vanilla Adam)",))
    paper_norm.set(
        title="The paper's Figure 2",
        xlabel="step (thousands)",
        ylabel="norm of the fused variance",
        yscale="log",
    )
    plot_paper_ratio(paper_ratio)
    step = figures.freeze_step(rows)
    paper_step = paper_number("bert_large_128_warmup")
    for axes, x, text in (
        (norm, step, step),
        (ratio, step, step),
        (paper_norm, paper_step / 1e3, paper_step),
        (paper_ratio, paper_step / 1e3, paper_step),
    ):
        figures.mark_freeze(axes, x, f"$T_w$ = {text:,.0f}")
    for axes in (ratio, paper_ratio):
        threshold = paper_number("auto_rule_threshold")
        axes.axhspan(threshold, 1 / threshold, color="0.85", zorder=0)
        axes.set_ylim(0.5, 1.5)
    return drawing


def plot_paper_ratio(axes: Axes) -> None:
    """The ratio over one window on the digitised curve, interpolated on the log scale on which it was drawn."""
    points = paper_curve("fig2", "variance norm (vanilla Adam)")
    window = 1e-3 / (1 - paper_number("beta2"))  # in thousands of steps, as x
    steps = points.x[points.x >= points.x.min() + window]
    logs = np.log(points.y)
    ratios = np.exp(np.interp(steps, points.x, logs) - np.interp(steps - window, points.x, logs))
    axes.plot(steps, ratios, **figures.look("adam", "Adam (from the paper's curve)"))
    axes.set(xlabel="step (thousands)", ylabel=f"ratio of the norm over {1e3 * window:,.0f} steps")
    axes.legend()


if __name__ == "__main__":
    figures.main(__file__)
