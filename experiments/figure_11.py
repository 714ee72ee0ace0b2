"""Figure 11: with momentum, SGD's relatives overtake 1-bit Adam on ResNet-18. Reads the runs of Figure 6."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_06"
OPTIMIZERS = ("adam", "onebit_adam", "momentum_sgd", "ef_momentum_sgd", "local_momentum_sgd")


def plot(rows: pd.DataFrame) -> Figure:
    """Loss and accuracy; ours, and the paper's Figure 11."""
    return figures.loss_and_accuracy(rows, 11)


if __name__ == "__main__":
    figures.main(__file__)
