"""Figure 13: Adam whose variance is averaged only every 3 or 5 steps falls behind. Reads the runs of Figure 6."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_06"
OPTIMIZERS = ("adam", "onebit_adam", "lazy_variance_3", "lazy_variance_5")


def plot(rows: pd.DataFrame) -> Figure:
    """Loss and accuracy; ours, and the paper's Figure 13."""
    return figures.loss_and_accuracy(rows, 13)


if __name__ == "__main__":
    figures.main(__file__)
