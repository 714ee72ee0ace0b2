"""Figure 10: 1-bit Adam beside SGD and the compressed and local methods that are built on it.

Reads the runs of Figure 6.
"""

import pandas as pd

from onebit.lab.claims.resnet import CHANCE
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Loss and accuracy; ours, and the paper's Figure 10."""
    return figures.loss_and_accuracy(rows, 10, CHANCE)


ARTIFACT = Figure(
    name="figure_10",
    title="1-bit Adam beside SGD and the methods that are built on it",
    experiment="figure_06",
    optimizers=("adam", "onebit_adam", "sgd", "double_squeeze", "local_sgd"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
