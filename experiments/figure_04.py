"""Figure 4: 1-bit Adam reaches Adam's loss with the same samples and a fraction of the bytes."""

import pandas as pd

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Ours against samples and against bytes sent; the paper's Figure 4a."""
    drawing, (by_samples, paper, by_volume) = figures.canvas(3)
    figures.loss_by_samples(by_samples, rows)
    figures.draw_paper(paper, "fig4a", ("Adam", "1-bit Adam"))
    paper.set(title="The paper's Figure 4a", xlabel="samples (millions)", ylabel="training loss")
    figures.loss_by_volume(by_volume, rows)
    figures.legend(drawing, by_samples)
    return drawing


ARTIFACT = Figure(
    name="figure_04",
    title="Loss against samples and against bytes",
    experiment="figure_04",
    optimizers=("adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam"),
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
