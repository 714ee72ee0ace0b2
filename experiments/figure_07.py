"""Figure 7: gain on ResNet-152, beside the most that the volumes allow."""

from onebit.lab.bench.model.artifacts import LOOKS, ModelFigure, plain_axis
from onebit.lab.bench.model.check import Check
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main
from onebit.lab.runs.load import paper_curve, paper_curves
from onebit.time_model import (
    Cluster,
    Link,
    Model,
    compressed_seconds,
    dense_seconds,
    equal_tensors,
)

PARAMETERS = 60_192_808  # of torchvision's resnet152
PER_NODE = 8
GPUS = (16, 32, 64, 128)


def limit(gpus: int, gradient_bytes: int) -> float:
    """Gain of a compressed exchange where nothing but the links between nodes takes time."""
    cluster = Cluster(gpus // PER_NODE, PER_NODE, Link(1e15), Link(1e9))
    model = Model.of(equal_tensors(PARAMETERS), gpus, gradient_bytes)
    return dense_seconds(cluster, model) / compressed_seconds(cluster, model)


def plot(found: Check) -> figures.Drawing:
    """Markers: the paper. Lines: the limits for gradients of 16 and of 32 bits."""
    drawing, (axes,) = figures.canvas(1)
    for look, name in enumerate(paper_curves("fig7")):
        colour, marker, _ = LOOKS[look]
        points = paper_curve("fig7", name)
        axes.plot(points.x, points.y, color=colour, marker=marker, linestyle="", label=name)
    for nbytes, line in ((2, "--"), (4, "-")):
        limits = [limit(gpus, nbytes) for gpus in GPUS]
        label = f"most that volumes allow, {8 * nbytes} bits"
        axes.plot(GPUS, limits, color="0.4", linestyle=line, label=label)
    axes.set(xlabel="GPUs", ylabel="gain", xscale="log", yscale="log")
    plain_axis(axes.xaxis, list(GPUS))
    plain_axis(axes.yaxis, [2, 4, 8, 16, 32])
    figures.legend(drawing)
    return drawing


ARTIFACT = ModelFigure(
    name="figure_07",
    title="Gain on ResNet-152",
    plot=plot,
    note="Markers: the paper, digitised. It states neither the batch, nor the stage, nor what the "
    "gain is relative to, so the model predicts no point. Lines: the gain where only the bytes on "
    "the links between nodes take time, for a ring in 16 and in 32 bits, with 8 GPUs in a node. "
    "The paper's gain over 1 Gbit/s lies above both.",
)

if __name__ == "__main__":
    main(ARTIFACT)
