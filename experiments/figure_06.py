"""Figure 6: on ResNet-18, 1-bit Adam and its uncompressed twin learn like Adam.

Naive 1-bit gradients do not."""

import pandas as pd

from onebit.lab.claims.resnet import CHANCE
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Loss and accuracy; ours, and the paper's Figure 6."""
    return figures.loss_and_accuracy(rows, 6, CHANCE)


ARTIFACT = Figure(
    name="figure_06",
    title="1-bit Adam, its uncompressed twin and naive 1-bit gradients beside Adam on ResNet-18",
    experiment="figure_06",
    optimizers=("adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam", "sgd"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
