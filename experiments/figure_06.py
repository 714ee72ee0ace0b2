"""Figure 6: on ResNet-18, 1-bit Adam and its uncompressed twin learn like Adam, naive 1-bit gradients do not."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_06"
OPTIMIZERS = ("adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam", "sgd")


def plot(rows: pd.DataFrame) -> Figure:
    """Loss and accuracy; ours, and the paper's Figure 6."""
    return figures.loss_and_accuracy(rows, 6)


if __name__ == "__main__":
    figures.main(__file__)
