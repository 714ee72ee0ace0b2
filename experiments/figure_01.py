"""Figure 1: Adam fed with error-compensated 1-bit gradients falls behind Adam.

Reads the runs of Figure 4.
"""

import pandas as pd

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Ours; the paper's Figure 1."""
    drawing, (ours, paper) = figures.canvas(2)
    figures.loss_by_samples(ours, rows)
    figures.draw_paper(paper, "fig1", ("Adam", "Adam w/ basic gradient compression"))
    paper.set(title="The paper's Figure 1", xlabel="samples (millions)", ylabel="training loss")
    figures.legend(drawing, ours)
    return drawing


ARTIFACT = Figure(
    name="figure_01",
    title="Adam on error-compensated 1-bit gradients beside Adam",
    experiment="figure_04",
    optimizers=("adam", "naive_onebit_adam"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
