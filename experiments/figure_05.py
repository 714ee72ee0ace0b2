"""Figure 5: throughput against GPUs, Adam and 1-bit Adam over Ethernet and InfiniBand."""

from onebit.lab.bench.model.artifacts import (
    SOURCE,
    ModelFigure,
    chosen,
    draw_points,
    plain_axis,
)
from onebit.lab.bench.model.check import Check
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main

PANELS = {
    "a": "(a) BERT-Large, 16 samples a GPU",
    "b": "(b) BERT-Large, batch 4,096",
    "c": "(c) SQuAD, 3 samples a GPU",
}


def plot(found: Check) -> figures.Drawing:
    """A panel for each of the paper's."""
    drawing, panels = figures.canvas(len(PANELS))
    for axes, (panel, title) in zip(panels, PANELS.items(), strict=True):
        points = chosen(found, f"Figure 5{panel}", "samples/s")
        draw_points(axes, points, lambda point: point.curve)
        axes.set(title=title, xlabel="GPUs", ylabel="samples a second", xscale="log", yscale="log")
        plain_axis(axes.xaxis, sorted({point.x for point in points}))
    figures.legend(drawing)
    return drawing


ARTIFACT = ModelFigure(
    name="figure_05",
    title="Throughput against GPUs",
    plot=plot,
    note=SOURCE
    + "1-bit Adam: its compressed stage. The one input that Figure 5 gives is Adam on 8 GPUs over "
    "InfiniBand in (c), from which the computing time of SQuAD is taken.",
)

if __name__ == "__main__":
    main(ARTIFACT)
