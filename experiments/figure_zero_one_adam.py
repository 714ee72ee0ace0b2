"""0/1 Adam: Adam's loss with the same samples, a fraction of 1-bit Adam's bytes and half of its rounds, since the variance changes ever less."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onebit.lab.claims.zero_one_adam import saved
from onebit.lab.report import figure as figures
from onebit.lab.runs.load import paper_number

EXPERIMENT = "zero_one_adam"
OPTIMIZERS = ("adam", "onebit_adam", "zero_one_adam")
NOTE = "Bars: 0/1 Adam against 1-bit Adam, ours at float32 with the lowest and highest seed; printed is what the abstract says of all its tasks."


def plot(rows: pd.DataFrame) -> Figure:
    """Above, loss against samples, bytes and collectives; below, what is saved, and the variance's change, ours and the paper's."""
    drawing, (by_samples, by_bytes, by_calls, savings, change, paper) = figures.figure(
        columns=3, rows=2
    )
    figures.draw(by_samples, rows, "samples", "loss", x_scale=1e3)
    by_samples.set(title="Ours", xlabel="samples (thousands)", ylabel="training loss")
    figures.draw(by_bytes, rows, "bytes_sent", "loss", x_scale=1e6, legend=False)
    by_bytes.set(
        title="Ours, by volume",
        xlabel="bytes sent by a worker (MB, log scale)",
        ylabel="training loss",
        xscale="log",
    )
    figures.draw(by_calls, rows, "calls", "loss", legend=False)
    by_calls.set(title="Ours, by rounds", xlabel="collectives", ylabel="training loss")
    plot_savings(savings, rows)
    if "variance_change:all" in rows:
        figures.draw(
            change, rows[rows.optimizer == "adam"], "step", "variance_change:all", legend=False
        )
    change.set(title="Ours", xlabel="step", ylabel=r"$\|v_t - v_{t-1}\|_2$", yscale="log")
    figures.draw_paper(paper, "zero_one_adam_variance", ("||v_t - v_{t-1}||",))
    paper.set(
        title="The paper's picture, read by eye",
        xlabel="step (thousands)",
        ylabel=r"$\|v_t - v_{t-1}\|$",
        yscale="log",
    )
    paper_step, step = paper_number("bert_large_128_warmup"), figures.freeze_step(rows)
    for axes, x, text in ((change, step, step), (paper, paper_step / 1e3, paper_step)):
        figures.mark_freeze(axes, x, f"$T_w$ of 1-bit Adam = {text:,.0f}")
    return drawing


def plot_savings(axes: Axes, rows: pd.DataFrame) -> None:
    """Volume and rounds that 0/1 Adam does without, in % of 1-bit Adam's: ours with the range of the seeds, and the paper's "up to"."""
    ours = [
        100 * saved(column)(rows[~rows.live.astype(bool)]) for column in ("bytes_sent", "calls")
    ]
    papers = [paper_number(f"zero_one_{what}_saved") for what in ("volume", "rounds")]
    means = [values.mean() for values in ours]
    spread = [
        [values.mean() - values.min() for values in ours],
        [values.max() - values.mean() for values in ours],
    ]
    colour = figures.LOOKS["zero_one_adam"][1]
    axes.bar([-0.2, 0.8], means, 0.35, yerr=spread, color=colour, label="ours", capsize=3)
    axes.bar(
        [0.2, 1.2],
        papers,
        0.35,
        facecolor="none",
        edgecolor=colour,
        hatch="//",
        label="printed, up to",
    )
    axes.set(
        title="Saved",
        ylabel="% of 1-bit Adam's",
        ylim=(0, 119),
        xticks=[0, 1],
        xticklabels=["volume", "rounds"],
    )
    axes.legend(loc="upper right", ncols=2)


if __name__ == "__main__":
    figures.main(__file__)
