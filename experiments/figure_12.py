"""Figure 12: Adam whose variance is sent in 16, 8 or 4 bits falls behind, or does not converge.

Reads the runs of Figure 6.
"""

import pandas as pd

from onebit.lab.claims.resnet import CHANCE
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Loss and accuracy; ours, and the paper's Figure 12."""
    return figures.loss_and_accuracy(rows, 12, CHANCE)


ARTIFACT = Figure(
    name="figure_12",
    title="Adam whose variance is sent in 16, 8 or 4 bits",
    experiment="figure_06",
    optimizers=("adam", "adam_variance_16bit", "adam_variance_8bit", "adam_variance_4bit"),
    plot=plot,
    note="Crosses at chance (10%) mark where runs diverged.",
)

if __name__ == "__main__":
    main(ARTIFACT)
