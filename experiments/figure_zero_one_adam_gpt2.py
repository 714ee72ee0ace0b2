"""0/1 Adam on GPT-2: training and validation loss of Adam, 1-bit Adam and 0/1 Adam."""

import pandas as pd

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Training and validation loss against samples, validation loss against bytes.

    The paper's curves could not be had.
    """
    drawing, (training, validation, by_volume) = figures.canvas(3)
    figures.loss_by_samples(training, rows)
    figures.loss_by_samples(validation, rows, "Ours, held out", "validation_loss")
    figures.loss_by_volume(by_volume, rows, "validation_loss")
    figures.legend(drawing, training)
    return drawing


ARTIFACT = Figure(
    name="figure_zero_one_adam_gpt2",
    title="0/1 Adam beside Adam and 1-bit Adam on GPT-2",
    experiment="zero_one_adam_gpt2",
    optimizers=("adam", "onebit_adam", "zero_one_adam"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
