"""Figure 8: a DCGAN trained with 1-bit Adam has the losses and images that it has with Adam."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import Figure, main
from onebit.lab.report.style import LOOKS

OPTIMIZERS = ("adam", "onebit_adam")


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Both players' losses, ours above the paper's; below, images from the same noise."""
    drawing, axes = figures.canvas(6)
    players = ("Discriminator", "Generator")
    for ours, papers, player in zip(axes[:2], axes[2:4], players, strict=True):
        figures.draw(ours, rows, "step", f"loss_{player.lower()}")
        ours.set(title=f"Ours: {player.lower()}", xlabel="steps", ylabel="training loss")
        curves = tuple(f"{player} ({name})" for name in ("Adam", "1-bit Adam"))
        figures.draw_paper(papers, "fig8a", curves)
        papers.set(
            title=f"The paper's Figure 8a: {player.lower()}", xlabel="steps", ylabel="training loss"
        )
    for panel, optimizer in zip(axes[4:], OPTIMIZERS, strict=True):
        show_samples(panel, rows[rows.optimizer == optimizer], LOOKS[optimizer][0])
    figures.legend(drawing, axes[0])
    return drawing


def show_samples(axes: Axes, rows: pd.DataFrame, name: str) -> None:
    """samples.png of the first seed that finished, and how far it is from real images.

    A committed seed comes before a live one.
    """
    axes.axis("off")
    finished = rows[rows.status == "finished"].sort_values(["live", "seed", "step"])
    if finished.empty:
        axes.set_title(f"{name}: no run finished")
        return
    run = finished[finished.folder == finished.folder.iloc[0]]
    axes.imshow(plt.imread(Path(run.folder.iloc[0]) / "samples.png"))
    distance = run.sliced_wasserstein.dropna().iloc[-1]
    axes.set_title(f"{name}, seed {run.seed.iloc[0]}: distance {distance:.3f}")


ARTIFACT = Figure(
    name="figure_08",
    title="A DCGAN's losses and images with Adam and with 1-bit Adam",
    experiment="figure_08",
    optimizers=OPTIMIZERS,
    plot=plot,
)

if __name__ == "__main__":
    main(ARTIFACT)
