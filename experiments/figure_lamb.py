"""1-bit LAMB keeps LAMB's convergence, basic 1-bit does not, since LAMB's coefficients and variances go on changing after T_w, each tensor's its own.

Figures 1, 2, 4, 5 and 6 and Table 2 of the 1-bit LAMB paper.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onebit.lab.claims.bert import final_loss
from onebit.lab.claims.claim import relative_gap
from onebit.lab.claims.lamb import by_steady_tensor
from onebit.lab.report import figure as figures
from onebit.lab.runs.load import paper_number

EXPERIMENT = "lamb"
OPTIMIZERS = ("lamb", "onebit_lamb", "lamb_basic_onebit")
NOTE = "Below, a line is a tensor; the biases of keys, which have no gradient, and of next-sentence prediction are left out."
# The kinds of tensors of BERT: the part of the name that tells them, grey, line. The first that fits.
KINDS = {
    "biases and LayerNorm": (("bias", "LayerNorm"), "0.75", ":"),
    "embeddings": (("embeddings",), "0.0", "-"),
    "heads": (("cls", "pooler"), "0.0", "--"),
    "layers' weights": (("",), "0.45", "-"),
}


def plot(rows: pd.DataFrame) -> Figure:
    """Above, convergence and the loss at the end beside Table 2; below, coefficients, variance norms and ratios, tensor by tensor."""
    drawing, (by_samples, by_bytes, table, coefficients, variances, ratios) = figures.figure(
        columns=3, rows=2
    )
    figures.draw(by_samples, rows, "samples", "loss", x_scale=1e3)
    by_samples.set(title="Ours (as Figure 2)", xlabel="samples (thousands)", ylabel="training loss")
    figures.draw(by_bytes, rows, "bytes_sent", "loss", x_scale=1e6, legend=False)
    by_bytes.set(
        title="Ours, by volume",
        xlabel="bytes sent by a worker (MB, log scale)",
        ylabel="training loss",
        xscale="log",
    )
    plot_gaps(table, rows)
    warmup = int(rows.warmup_steps.iloc[0])
    for axes, optimizer, quantity, title, labels in (
        (
            coefficients,
            "lamb",
            "coefficient",
            "LAMB (as Figures 1, 4 and 5)",
            {"ylabel": "coefficient c", "yscale": "log"},
        ),
        (
            variances,
            "lamb",
            "variance",
            "LAMB (as Figures 1, 4 and 5)",
            {"ylabel": r"$\|v_t\|_2$", "yscale": "log"},
        ),
        (ratios, "onebit_lamb", "ratio", "1-bit LAMB (as Figure 6)", {"ylabel": "ratio r"}),
    ):
        seed = plot_tensors(
            axes, rows[(rows.optimizer == optimizer) & (rows.status == "finished")], quantity
        )
        axes.set(title=f"Ours, {title}{seed}", xlabel="step", **labels)
        figures.mark_freeze(axes, warmup, f"$T_w$ = {warmup:,}")
    coefficients.legend(loc="lower right")
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
    for place, optimizer in enumerate(OPTIMIZERS[1:]):
        name, colour, _, marker = figures.LOOKS[optimizer]
        ours = 100 * relative_gap(final_loss, optimizer, "lamb")(
            rows[~rows.live.astype(bool) & (rows.status == "finished")]
        )
        if len(ours):
            spread = [[ours.mean() - ours.min()], [ours.max() - ours.mean()]]
            axes.errorbar(
                [place - 0.1],
                [ours.mean()],
                spread,
                color=colour,
                marker=marker,
                capsize=3,
                linestyle="none",
            )
        axes.plot(
            [place + 0.1],
            [100 * (paper_number(f"{optimizer}_validation_loss") / lamb - 1)],
            color=colour,
            marker=marker,
            fillstyle="none",
            linestyle="none",
        )
    axes.plot([], [], color="0.3", marker="o", linestyle="none", label="ours, training loss")
    axes.plot(
        [],
        [],
        color="0.3",
        marker="o",
        fillstyle="none",
        linestyle="none",
        label="Table 2, validation loss",
    )
    axes.axhline(0, color=figures.LOOKS["lamb"][1], linestyle=figures.LOOKS["lamb"][2], linewidth=1)
    axes.set(
        title="Loss at the end against LAMB's",
        ylabel="%",
        xticks=[0, 1],
        xlim=(-0.5, 1.5),
        xticklabels=[figures.LOOKS[name][0] for name in OPTIMIZERS[1:]],
    )
    axes.legend()


if __name__ == "__main__":
    figures.main(__file__)
