"""Figure 13: Adam whose variance is averaged only every 3 or 5 steps falls behind.

Reads the runs of Figure 6.
"""

import pandas as pd

from onebit.lab.claims.resnet import CHANCE
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Loss and accuracy; ours, and the paper's Figure 13."""
    return figures.loss_and_accuracy(rows, 13, CHANCE)


ARTIFACT = Figure(
    name="figure_13",
    title="Adam whose variance is averaged only every 3 or 5 steps",
    experiment="figure_06",
    optimizers=("adam", "onebit_adam", "lazy_variance_3", "lazy_variance_5"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
