"""1-bit LAMB keeps LAMB's convergence and basic 1-bit compression does not, says its paper.

The reason it gives is that LAMB's coefficients and variances go on changing after T_w, each
tensor's in its own way. Figures 1, 2, 4, 5 and 6 and Table 2 of the 1-bit LAMB paper; its curves
are not digitised.
"""

import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.claims.statistics import by_steady_tensor, loss_gap
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main
from onebit.lab.report.style import LOOKS
from onebit.lab.runs.load import paper_number

OPTIMIZERS = ("lamb", "onebit_lamb", "lamb_basic_onebit")
# The kinds of tensors of BERT: the parts of a name that tell them, grey, line. The first that fits.
KINDS = {
    "biases and LayerNorm": (("bias", "LayerNorm"), "0.75", ":"),
    "embeddings": (("embeddings",), "0.0", "-"),
    "heads": (("cls", "pooler"), "0.0", "--"),
    "layers' weights": (("",), "0.45", "-"),
}
# Title, optimizer, quantity and y axis of the panels that have a line for each tensor.
BY_TENSOR = (
    ("LAMB: coefficients", "lamb", "coefficient", {"ylabel": "coefficient c", "yscale": "log"}),
    ("LAMB: variance norms", "lamb", "variance", {"ylabel": r"$\|v_t\|_2$", "yscale": "log"}),
    ("1-bit LAMB: ratios", "onebit_lamb", "ratio", {"ylabel": "ratio r"}),
)


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Convergence, the loss at the end beside Table 2, and the state tensor by tensor."""
    drawing, (by_samples, by_volume, table, *by_tensor) = figures.canvas(6)
    figures.loss_by_samples(by_samples, rows, "Ours (as Figure 2)")
    figures.loss_by_volume(by_volume, rows)
    plot_gaps(table, rows)
    warmup = int(rows.warmup_steps.iloc[0])
    for axes, (title, optimizer, quantity, labels) in zip(by_tensor, BY_TENSOR, strict=True):
        finished = rows[(rows.optimizer == optimizer) & (rows.status == "finished")]
        seed = plot_tensors(axes, finished, quantity)
        axes.set(title=f"{title}{seed}", xlabel="step", **labels)
        figures.mark_freeze(axes, warmup, warmup)
    figures.legend(drawing, by_samples, table, by_tensor[0])
    return drawing


def plot_tensors(axes: Axes, rows: pd.DataFrame, quantity: str) -> str:
    """A line for each tensor of the first seed, in the look of its kind; returns which seed."""
    if rows.empty:
        return ""
    seed = rows.seed.min()
    run = rows[rows.seed == seed]
    labelled = set()
    for tensor, values in by_steady_tensor(run, quantity).items():
        kind = next(
            kind for kind, (marks, *_) in KINDS.items() if any(mark in tensor for mark in marks)
        )
        values = values.dropna()
        _, colour, line = KINDS[kind]
        axes.plot(
            run.step[values.index],
            values,
            color=colour,
            linestyle=line,
            linewidth=0.8,
            label=None if kind in labelled else kind,
        )
        labelled.add(kind)
    return f", seed {seed}"


def plot_gaps(axes: Axes, rows: pd.DataFrame) -> None:
    """The loss at the end against LAMB's, in %: ours with the range of the seeds, and Table 2."""
    lamb = paper_number("lamb_validation_loss")
    committed = rows[~rows.live.astype(bool) & (rows.status == "finished")]
    for place, optimizer in enumerate(OPTIMIZERS[1:]):
        _, colour, _, marker = LOOKS[optimizer]
        style = {"color": colour, "marker": marker, "linestyle": "none"}
        ours = 100 * loss_gap(optimizer, "lamb")(committed)
        if len(ours):
            spread = [[ours.mean() - ours.min()], [ours.max() - ours.mean()]]
            axes.errorbar([place - 0.1], [ours.mean()], spread, capsize=3, **style)
        papers = 100 * (paper_number(f"{optimizer}_validation_loss") / lamb - 1)
        axes.plot([place + 0.1], [papers], fillstyle="none", **style)
    grey = {"color": "0.3", "marker": "o", "linestyle": "none"}
    axes.plot([], [], label="ours, training loss at the end", **grey)
    axes.plot([], [], fillstyle="none", label="Table 2, validation loss", **grey)
    axes.axhline(0, color=LOOKS["lamb"][1], linestyle=LOOKS["lamb"][2], linewidth=1)
    axes.set(
        title="Loss at the end, against LAMB's",
        ylabel="difference from LAMB's loss (%)",
        xticks=[0, 1],
        xlim=(-0.5, 1.5),
        xticklabels=[LOOKS[name][0] for name in OPTIMIZERS[1:]],
    )


ARTIFACT = Figure(
    name="figure_lamb",
    title="1-bit LAMB and basic 1-bit compression beside LAMB",
    experiment="lamb",
    optimizers=OPTIMIZERS,
    plot=plot,
    note=(
        "In the last three panels, which correspond to the paper's Figures 1, 4, 5 and 6, a line "
        "is a tensor; the biases of keys, which have no gradient, and of next-sentence prediction "
        "are left out. In the panel of losses at the end a bar spans the seeds."
    ),
)

if __name__ == "__main__":
    main(ARTIFACT)
