"""How much must be sent? 1-bit Adam with other compressors, and with one scale for all tensors. Not in the papers."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures
from onebit.lab.report import sweep as sweeps
from onebit.lab.report.sweep import caption as caption

EXPERIMENT = "figure_04"
VARIANTS = {
    "onebit_adam": "1 bit",
    "onebit_adam_fused": "1 bit, one scale",
    "onebit_adam_2bit": "2 bits",
    "onebit_adam_4bit": "4 bits",
    "onebit_adam_8bit": "8 bits",
    "onebit_adam_32bit": "32 bits",
    "onebit_adam_topk": "top 1/64",
}
OPTIMIZERS = ("adam", *VARIANTS)
SMOKE_OPTIMIZERS = (
    "adam",
    "onebit_adam",
    "onebit_adam_4bit",
    "onebit_adam_topk",
)  # all take more than a minute


def plot(rows: pd.DataFrame) -> Figure:
    """The loss, and its difference from Adam's by compressor and against the volume."""
    return sweeps.plot(rows, VARIANTS, "compressor of the momentum")


if __name__ == "__main__":
    figures.main(__file__)
