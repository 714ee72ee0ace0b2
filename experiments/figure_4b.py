"""Figure 4b: training loss against hours, 64 GPUs over Ethernet."""

import pandas as pd

from onebit.lab.bench.model.artifacts import LOOKS, SOURCE, ModelFigure
from onebit.lab.bench.model.check import Check
from onebit.lab.bench.model.papers import predicted_seconds
from onebit.lab.bench.model.points import HOUR, pretraining
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main
from onebit.lab.runs.load import paper_curve, paper_number
from onebit.time_model import ADAM, COMPRESSED

CURVES = ("Adam", "1-bit Adam")
MILLION = 1e6


def hours(curve: str, samples: pd.Series) -> pd.Series:
    """When the model has processed so many million samples."""
    setting = pretraining()
    dense, compressed = (predicted_seconds(method, setting) for method in (ADAM, COMPRESSED))
    steps = samples * MILLION / setting.batch
    warmup = paper_number("bert_large_128_warmup")
    warm = steps if curve == "Adam" else steps.clip(upper=warmup)
    return (warm * dense + (steps - warm) * compressed) / HOUR


def plot(found: Check) -> figures.Drawing:
    """The paper's Figure 4b, and its losses against samples at the hours of the model."""
    drawing, panels = figures.canvas(2)
    for look, curve in enumerate(CURVES):
        colour, _, line = LOOKS[look]
        printed, by_samples = (paper_curve(name, curve) for name in ("fig4b", "fig4a"))
        style = {"color": colour, "linestyle": line, "linewidth": 1.3, "label": curve}
        panels[0].plot(printed.x, printed.y, **style)
        panels[1].plot(hours(curve, by_samples.x), by_samples.y, **style)
    panels[0].set_title("The paper's Figure 4b")
    panels[1].set_title("Figure 4a's losses at the model's hours")
    for axes in panels:
        axes.set(xlabel="hours", ylabel="training loss", xlim=(0, 180))
    figures.legend(drawing)
    return drawing


ARTIFACT = ModelFigure(
    name="figure_4b",
    title="Training loss against hours",
    plot=plot,
    note=SOURCE.replace("Markers: the paper. Lines", "Right")
    + "BERT-Large on 64 V100, batch 4,096. The paper's own Table 1 gives Adam 115 hours, Figure 4b "
    "174; the model says 130.",
)

if __name__ == "__main__":
    main(ARTIFACT)
