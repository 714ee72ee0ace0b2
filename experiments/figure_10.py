"""Figure 10: 1-bit Adam beside SGD and the compressed and local methods that are built on it. Reads the runs of Figure 6."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_06"
OPTIMIZERS = ("adam", "onebit_adam", "sgd", "double_squeeze", "local_sgd")


def plot(rows: pd.DataFrame) -> Figure:
    """Loss and accuracy; ours, and the paper's Figure 10."""
    return figures.loss_and_accuracy(rows, 10)


if __name__ == "__main__":
    figures.main(__file__)
