"""Figure 8: a DCGAN trained with 1-bit Adam has the losses that it has with Adam, and generates such images."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onebit.lab.report import figure as figures

EXPERIMENT = "figure_08"
OPTIMIZERS = ("adam", "onebit_adam")


def plot(rows: pd.DataFrame) -> Figure:
    """Both players' losses, ours above the paper's; below them what the generators make of the same noise."""
    drawing, axes = figures.figure(columns=2, rows=3)
    for ours, papers, player in zip(
        axes[:2], axes[2:4], ("Discriminator", "Generator"), strict=True
    ):
        figures.draw(ours, rows, "step", f"loss_{player.lower()}", legend=player == "Discriminator")
        ours.set(title=f"Ours: {player.lower()}", xlabel="steps", ylabel="training loss")
        figures.draw_paper(
            papers, "fig8a", tuple(f"{player} ({name})" for name in ("Adam", "1-bit Adam"))
        )
        papers.set(
            title=f"The paper's Figure 8a: {player.lower()}", xlabel="steps", ylabel="training loss"
        )
    for panel, optimizer in zip(axes[4:], OPTIMIZERS, strict=True):
        show_samples(panel, rows[rows.optimizer == optimizer], figures.LOOKS[optimizer][0])
    return drawing


def show_samples(axes: Axes, rows: pd.DataFrame, name: str) -> None:
    """samples.png of the first seed that finished, committed ones first, and how far it is from real images."""
    axes.axis("off")
    finished = rows[rows.status == "finished"].sort_values(["live", "seed", "step"])
    if finished.empty:
        axes.set_title(f"{name}: no run finished")
        return
    run = finished[finished.folder == finished.folder.iloc[0]]
    axes.imshow(plt.imread(Path(run.folder.iloc[0]) / "samples.png"))
    axes.set_title(
        f"{name}, seed {run.seed.iloc[0]}: distance {run.sliced_wasserstein.dropna().iloc[-1]:.3f}"
    )


if __name__ == "__main__":
    figures.main(__file__)
