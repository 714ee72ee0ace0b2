"""How long must the warm-up be? 1-bit Adam with T_w from 5 to 50 % of the steps. Not in the papers."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures
from onebit.lab.report import sweep as sweeps
from onebit.lab.report.sweep import caption as caption

EXPERIMENT = "figure_04"
VARIANTS = {
    "onebit_adam_warmup_5": "5%",
    "onebit_adam_warmup_10": "10%",
    "onebit_adam": "15%",  # the paper's share
    "onebit_adam_warmup_25": "25%",
    "onebit_adam_warmup_50": "50%",
}
OPTIMIZERS = ("adam", *VARIANTS)


def plot(rows: pd.DataFrame) -> Figure:
    """The loss, and its difference from Adam's by T_w and against the volume."""
    return sweeps.plot(rows, VARIANTS, "T_w, share of the steps")


if __name__ == "__main__":
    figures.main(__file__)
