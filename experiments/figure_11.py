"""Figure 11: with momentum, SGD's relatives overtake 1-bit Adam on ResNet-18.

Reads the runs of Figure 6.
"""

import pandas as pd

from onebit.lab.claims.resnet import CHANCE
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Loss and accuracy; ours, and the paper's Figure 11."""
    return figures.loss_and_accuracy(rows, 11, CHANCE)


ARTIFACT = Figure(
    name="figure_11",
    title="1-bit Adam beside momentum SGD and its relatives on ResNet-18",
    experiment="figure_06",
    optimizers=("adam", "onebit_adam", "momentum_sgd", "ef_momentum_sgd", "local_momentum_sgd"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
