"""Figure 3 of 1-bit LAMB: throughput of LAMB and 1-bit LAMB against GPUs."""

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

TASKS = {"128": "sequence length 128", "512": "sequence length 512"}


def plot(found: Check) -> figures.Drawing:
    """A panel for each sequence length and batch; the point of InfiniBand is the one at 128."""
    points = chosen(found, "1-bit LAMB, Figure 3", "samples/s")
    settings = list(dict.fromkeys((p.quantity[1].task, p.quantity[1].batch) for p in points))
    drawing, panels = figures.canvas(len(settings))
    for axes, (task, batch) in zip(panels, settings, strict=True):
        drawn = [p for p in points if (p.quantity[1].task, p.quantity[1].batch) == (task, batch)]
        draw_points(axes, drawn, lambda point: point.curve)
        axes.set(
            title=f"{TASKS[task]}, batch {batch:,}",
            xlabel="GPUs",
            ylabel="samples a second",
            xscale="log",
            yscale="log",
        )
        plain_axis(axes.xaxis, [64, 128, 256])
    figures.legend(drawing)
    return drawing


ARTIFACT = ModelFigure(
    name="figure_lamb_03",
    title="Throughput of LAMB and of the compressed stage of 1-bit LAMB",
    plot=plot,
    note=SOURCE
    + "End points of the curves, digitised; over InfiniBand there is one, on 128 GPUs. For length "
    "512 no computing time is printed: it is taken from 1-bit LAMB over InfiniBand, batch 32,768.",
)

if __name__ == "__main__":
    main(ARTIFACT)
