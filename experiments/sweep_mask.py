"""What to do where the variance is zero at the freeze? 1-bit Adam with its mask, or with a floor under the variance. Not in the papers."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures
from onebit.lab.report import sweep as sweeps
from onebit.lab.report.sweep import caption as caption

EXPERIMENT = "figure_04"
VARIANTS = {
    "onebit_adam": "mask",
    "onebit_adam_floor_1e-4": "0.0001",
    "onebit_adam_floor_1e-2": "0.01",
    "onebit_adam_floor_1": "1",
}
OPTIMIZERS = ("adam", *VARIANTS)


def plot(rows: pd.DataFrame) -> Figure:
    """The loss, and its difference from Adam's by floor and against the volume."""
    return sweeps.plot(rows, VARIANTS, "mask, or floor as a share of the tensor's mean variance")


if __name__ == "__main__":
    figures.main(__file__)
