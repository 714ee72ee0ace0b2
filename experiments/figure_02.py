"""Figure 2: the variance norm of Adam settles, and T_w comes after it has.

Reads the runs of Figure 4.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main
from onebit.lab.report.style import look
from onebit.lab.runs.load import paper_curve, paper_number


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Above the norm, below its ratio over 1/(1 - beta2) steps; ours and the paper's Figure 2."""
    drawing, (norm, paper_norm, ratio, paper_ratio) = figures.canvas(4)
    figures.draw(norm, rows, "step", "variance_l2")
    norm.set(title="Ours: norm", xlabel="step", ylabel=r"$\|v_t\|_2$", yscale="log")
    figures.draw(ratio, rows[rows.optimizer == "adam"], "step", "variance_ratio")
    ratio.set(
        title="Ours: ratio", xlabel="step", ylabel=r"$\|v_t\|_1\,/\,\|v_{t-1/(1-\beta_2)}\|_1$"
    )
    figures.draw_paper(paper_norm, "fig2", ("variance norm (vanilla Adam)",))
    paper_norm.set(
        title="The paper's Figure 2: norm",
        xlabel="step (thousands)",
        ylabel="norm of the fused variance",
        yscale="log",
    )
    draw_paper_ratio(paper_ratio)
    step, paper_step = figures.freeze_step(rows), paper_number("bert_large_128_warmup")
    for axes in (norm, ratio):
        figures.mark_freeze(axes, step, step)
    for axes in (paper_norm, paper_ratio):
        figures.mark_freeze(axes, paper_step / 1e3, paper_step)
    for axes in (ratio, paper_ratio):
        threshold = paper_number("auto_rule_threshold")
        axes.axhspan(threshold, 1 / threshold, color="0.85", zorder=0)
        axes.set_ylim(0.5, 1.5)
    figures.legend(drawing, norm)
    return drawing


def draw_paper_ratio(axes: Axes) -> None:
    """The ratio over one window on the digitised curve.

    The curve is interpolated on the logarithmic scale on which it was drawn.
    """
    points = paper_curve("fig2", "variance norm (vanilla Adam)")
    window = 1e-3 / (1 - paper_number("beta2"))  # in thousands of steps, as x
    steps = points.x[points.x >= points.x.min() + window]
    logs = np.log(points.y)
    ratios = np.exp(np.interp(steps, points.x, logs) - np.interp(steps - window, points.x, logs))
    axes.plot(steps, ratios, **look("adam", "Adam (from the paper's curve)"))
    axes.set(
        title="Ratio, computed from Figure 2",
        xlabel="step (thousands)",
        ylabel=f"ratio of the norm over {1e3 * window:,.0f} steps",
    )


ARTIFACT = Figure(
    name="figure_02",
    title="The variance norm of Adam, and its ratio over one window",
    experiment="figure_04",
    optimizers=("adam", "onebit_adam"),
    plot=plot,
    note="Grey: where the paper's rule counts the variance as settled.",
)

if __name__ == "__main__":
    main(ARTIFACT)
