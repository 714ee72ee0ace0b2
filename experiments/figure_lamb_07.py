"""Figure 7 of 1-bit LAMB: the backends NCCL and MPI."""

from onebit.lab.bench.model.artifacts import (
    SOURCE,
    ModelFigure,
    chosen,
    draw_points,
    plain_axis,
)
from onebit.lab.bench.model.check import Check
from onebit.lab.bench.model.points import Point
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main

NETWORKS = ("Ethernet", "InfiniBand")


def plot(found: Check) -> figures.Drawing:
    """A panel for each network: throughput against the batch."""
    drawing, panels = figures.canvas(len(NETWORKS))
    points = chosen(found, "1-bit LAMB, Figure 7")
    for axes, network in zip(panels, NETWORKS, strict=True):
        drawn = [by_batch(point) for point in points if network in point.what]
        draw_points(axes, drawn, lambda point: point.curve)
        axes.set(
            title=drawn[0].what.partition(", batch")[0],
            xlabel="batch (thousands)",
            ylabel="samples a second",
            xscale="log",
            yscale="log",
        )
        plain_axis(axes.xaxis, sorted({point.x for point in drawn}))
    figures.legend(drawing)
    return drawing


def by_batch(point: Point) -> Point:
    """The same point over its batch, in thousands of 1,024."""
    batch = int(point.what.rpartition("batch ")[2].replace(",", ""))
    return Point(**{**point.__dict__, "x": batch / 1024})


ARTIFACT = ModelFigure(
    name="figure_lamb_07",
    title="1-bit LAMB with NCCL and with MPI",
    plot=plot,
    note=SOURCE
    + "The model knows links, not libraries: its lines for NCCL and MPI are the same, and the "
    "copies between GPU and host that MPI needs are missing.",
)

if __name__ == "__main__":
    main(ARTIFACT)
