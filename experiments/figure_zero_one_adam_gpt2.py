"""0/1 Adam on GPT-2: training and validation loss of Adam, 1-bit Adam and 0/1 Adam."""

import pandas as pd
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "zero_one_adam_gpt2"
OPTIMIZERS = ("adam", "onebit_adam", "zero_one_adam")


def plot(rows: pd.DataFrame) -> Figure:
    """Training loss and validation loss against samples, validation loss against bytes. The paper's curves could not be had."""
    drawing, (training, validation, by_bytes) = figures.figure(columns=3)
    figures.draw(training, rows, "samples", "loss", x_scale=1e3)
    training.set(title="Ours", xlabel="samples (thousands)", ylabel="training loss")
    figures.draw(validation, rows, "samples", "validation_loss", x_scale=1e3, legend=False)
    validation.set(title="Ours, held out", xlabel="samples (thousands)", ylabel="validation loss")
    figures.draw(by_bytes, rows, "bytes_sent", "validation_loss", x_scale=1e6, legend=False)
    by_bytes.set(
        title="Ours, by volume",
        xlabel="bytes sent by a worker (MB, log scale)",
        ylabel="validation loss",
        xscale="log",
    )
    return drawing


if __name__ == "__main__":
    figures.main(__file__)
