"""Figure 4: 1-bit Adam reaches Adam's loss with the same samples, and with a fraction of the bytes."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_04"
OPTIMIZERS = ("adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam")


def plot(rows: pd.DataFrame) -> Figure:
    """Ours against samples and against bytes sent; the paper's Figure 4a."""
    drawing, (by_samples, by_bytes, paper) = figures.figure(columns=3)
    figures.draw(by_samples, rows, "samples", "loss", x_scale=1e3)
    by_samples.set(title="Ours", xlabel="samples (thousands)", ylabel="training loss")
    figures.draw(by_bytes, rows, "bytes_sent", "loss", x_scale=1e6, legend=False)
    by_bytes.set(
        title="Ours, by volume",
        xlabel="bytes sent by a worker (MB, log scale)",
        ylabel="training loss",
        xscale="log",
    )
    figures.draw_paper(paper, "fig4a", ("Adam", "1-bit Adam"))
    paper.set(title="The paper's Figure 4a", xlabel="samples (millions)", ylabel="training loss")
    return drawing


if __name__ == "__main__":
    figures.main(__file__)
