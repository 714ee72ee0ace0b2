"""Figure 9: the slower the network, the larger the gain of a compressed step."""

import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.bench.model.artifacts import (
    LOOKS,
    SOURCE,
    ModelFigure,
    chosen,
    draw_points,
    plain_axis,
)
from onebit.lab.bench.model.check import Check
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main
from onebit.lab.runs import measurements
from onebit.lab.runs.load import RESULTS

OURS = {"onebit_adam": "1-bit Adam", "zero_one_adam": "0/1 Adam", "local_adam": "local Adam"}
TRAINING = ("network", "--parts", "training", "--hosts", "2")
RATES = ("10000", "3000", "1000", "500", "200", "100")  # 50 Mbit/s alone takes 4 minutes
TICKS = [50.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0]


def plot(found: Check) -> figures.Drawing:
    """The paper's and the model's; ours beside it, if results/speed/network.csv is there."""
    ours = measured()
    drawing, panels = figures.canvas(1 + (ours is not None))
    draw_points(panels[0], chosen(found, "Figure 9"), lambda point: "1-bit Adam, 256 GPUs")
    panels[0].set_title("The paper's Figure 9")
    if ours is not None:
        draw_ours(panels[1], ours)
    for axes in panels:
        axes.set(xlabel="Mbit/s", ylabel="step of Adam / step", xscale="log", yscale="log")
        plain_axis(axes.xaxis, TICKS)
        plain_axis(axes.yaxis, [1, 2, 4, 6, 8, 10, 20])
    figures.legend(drawing)
    return drawing


def measured() -> pd.DataFrame | None:
    """The training of a BERT on two hosts; None if nobody has measured it."""
    try:
        rows, _ = measurements.read(RESULTS, "speed", "network")
    except FileNotFoundError:
        return None
    return rows[(rows.part == "training") & (rows.hosts == 2) & (rows.rate_mbit > 0)]


def draw_ours(axes: Axes, rows: pd.DataFrame) -> None:
    """How many times as fast as DistributedDataParallel with Adam."""
    for look, (name, label) in enumerate(OURS.items(), 1):
        curve = rows[rows.contender == name].sort_values("rate_mbit")
        colour, marker, line = LOOKS[look]
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 4}
        axes.plot(curve.rate_mbit, 1 / curve.ratio, label=f"{label}, 2 hosts", **style)
    axes.set_title("Ours, two hosts on one machine")


ARTIFACT = ModelFigure(
    name="figure_09",
    measures={"smoke": (*TRAINING, "--quick"), "laptop": (*TRAINING, "--rates", *RATES)},
    plan_notes={
        "smoke": "measures the training of a tiny BERT on a limited link, into results/live",
        "laptop": "measures the training of a BERT on two hosts from 100 Mbit/s to 10 Gbit/s, "
        "7 minutes, as far as results/speed/network.csv lacks it; needs root and iproute2",
    },
    title="Gain of a compressed step against the bandwidth",
    plot=plot,
    note=SOURCE
    + "BERT-Large on 64 nodes of 4 V100, Ethernet limited by tc. The batch is not stated; the "
    "model takes 16 samples a GPU. At 50 and 100 Mbit/s the paper's gain is larger than the ratio "
    "of the volumes in half precision, which is 6.5. Ours: experiments/network.py --measure.",
)

if __name__ == "__main__":
    main(ARTIFACT)
