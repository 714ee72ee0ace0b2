"""Figure 12: Adam whose variance is sent in 16, 8 or 4 bits falls behind, or does not converge. Reads the runs of Figure 6."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_06"
OPTIMIZERS = ("adam", "adam_variance_16bit", "adam_variance_8bit", "adam_variance_4bit")


def plot(rows: pd.DataFrame) -> Figure:
    """Loss and accuracy; ours, and the paper's Figure 12."""
    return figures.loss_and_accuracy(rows, 12)


if __name__ == "__main__":
    figures.main(__file__)
