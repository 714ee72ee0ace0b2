"""0/1 Adam: Adam's loss with the same samples, and a fraction of 1-bit Adam's bytes and rounds.

It can save that much because the variance changes ever less.
"""

import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.claims.statistics import saved
from onebit.lab.claims.zero_one_adam import with_rounds
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main
from onebit.lab.report.style import LOOKS
from onebit.lab.runs.load import paper_number


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Loss against samples, bytes and rounds; what is saved; the variance's change."""
    drawing, (by_samples, by_volume, by_rounds, savings, change, paper) = figures.canvas(6)
    figures.loss_by_samples(by_samples, rows)
    figures.loss_by_volume(by_volume, rows)
    rows = with_rounds(rows)
    figures.draw(by_rounds, rows, "rounds", "loss")
    by_rounds.set(title="Ours, by rounds", xlabel="steps with an exchange", ylabel="training loss")
    plot_savings(savings, rows)
    plot_change(change, paper, rows)
    figures.legend(drawing, by_samples, savings)
    return drawing


def plot_change(ours: Axes, paper: Axes, rows: pd.DataFrame) -> None:
    """How much Adam's variance changes in a step: ours and the paper's."""
    if "variance_change:all" in rows:
        figures.draw(ours, rows[rows.optimizer == "adam"], "step", "variance_change:all")
    label = r"$\|v_t - v_{t-1}\|_2$"
    ours.set(title="Ours: change of Adam's variance", xlabel="step", ylabel=label, yscale="log")
    figures.draw_paper(paper, "zero_one_adam_variance", ("||v_t - v_{t-1}||",))
    paper.set(
        title="The paper's picture, read by eye",
        xlabel="step (thousands)",
        ylabel=r"$\|v_t - v_{t-1}\|$",
        yscale="log",
    )
    step, paper_step = figures.freeze_step(rows), paper_number("bert_large_128_warmup")
    figures.mark_freeze(ours, step, step, of=" of 1-bit Adam")
    figures.mark_freeze(paper, paper_step / 1e3, paper_step)


def plot_savings(axes: Axes, rows: pd.DataFrame) -> None:
    """What 0/1 Adam saves of 1-bit Adam's volume and rounds, in %; the paper's is "up to"."""
    committed = rows[~rows.live.astype(bool)]
    ours = [100 * saved(column)(committed) for column in ("bytes_sent", "rounds")]
    papers = [paper_number(f"zero_one_{what}_saved") for what in ("volume", "rounds")]
    means = [values.mean() for values in ours]
    spread = [
        [values.mean() - values.min() for values in ours],
        [values.max() - values.mean() for values in ours],
    ]
    colour = LOOKS["zero_one_adam"][1]
    style = {"color": colour, "capsize": 3, "label": "saved, ours"}
    axes.bar([-0.2, 0.8], means, 0.35, yerr=spread, **style)
    printed = {"facecolor": "none", "edgecolor": colour, "hatch": "//"}
    axes.bar([0.2, 1.2], papers, 0.35, label='saved, the paper\'s "up to"', **printed)
    axes.set(
        title="What 0/1 Adam saves",
        ylabel="saved of 1-bit Adam's (%)",
        ylim=(0, 100),
        xticks=[0, 1],
        xticklabels=["bytes", "rounds"],
    )


ARTIFACT = Figure(
    name="figure_zero_one_adam",
    title="0/1 Adam beside Adam and 1-bit Adam on BERT",
    experiment="zero_one_adam",
    optimizers=("adam", "onebit_adam", "zero_one_adam"),
    # How densely the variance is updated: until T_w, and as the authors' script does.
    workstation_optimizers=("adam", "onebit_adam", "zero_one_adam", "zero_one_adam_script"),
    plot=plot,
    note=(
        "A round is a step in which the ranks exchange gradients or momenta. Bars: what 0/1 Adam "
        "saves against 1-bit Adam, ours at float32 with the lowest and highest seed; the paper's "
        "numbers are what the abstract says of all its tasks."
    ),
)

if __name__ == "__main__":
    main(ARTIFACT)
