"""Figure 1: Adam fed with error-compensated 1-bit gradients falls behind Adam. Reads the runs of Figure 4."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_04"
OPTIMIZERS = ("adam", "naive_onebit_adam")


def plot(rows: pd.DataFrame) -> Figure:
    """Ours; the paper's Figure 1."""
    drawing, (ours, paper) = figures.figure(columns=2)
    figures.draw(ours, rows, "samples", "loss", x_scale=1e3)
    ours.set(title="Ours", xlabel="samples (thousands)", ylabel="training loss")
    figures.draw_paper(paper, "fig1", ("Adam", "Adam w/ basic gradient compression"))
    paper.set(title="The paper's Figure 1", xlabel="samples (millions)", ylabel="training loss")
    return drawing


if __name__ == "__main__":
    figures.main(__file__)
