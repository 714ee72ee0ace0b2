"""The speed-up over AdamW against the bandwidth, as a picture. Needs matplotlib."""

from pathlib import Path

import numpy as np

from onebit.plan.answer import PAYS, RIVAL, Question, speedup

DECADES = 2.0  # on either side of the bandwidth that was asked about
POINTS = 81
# Okabe and Ito's palette; a curve is known by its line as well.
LOOKS = {"OneBitAdam": ("#D55E00", "-"), "OneBitLamb": ("#0072B2", ":")}
LOOKS["ZeroOneAdam"] = ("#009E73", "--")


def draw(question: Question, bandwidth: float, optimizers: list[str], path: Path) -> None:
    """Write the picture to `path`; RuntimeError with the remedy if there is no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise RuntimeError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
        ) from None
    rates = bandwidth * np.logspace(-DECADES, DECADES, POINTS)
    drawing, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in optimizers:
        if name != RIVAL:
            colour, line = LOOKS[name]
            ratios = [speedup(question.at(rate), name) for rate in rates]
            axes.plot(rates / 1e9, ratios, color=colour, linestyle=line, label=name)
    axes.axvline(bandwidth / 1e9, color="0.4", linewidth=0.8)
    axes.axhline(PAYS, color="0.4", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.annotate("it pays above this line", (rates[0] / 1e9, PAYS), fontsize=8, va="bottom")
    where = "between nodes" if question.cluster.nodes > 1 else "inside the node"
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=f"bandwidth {where} (Gbit/s); upright line: as asked",
        ylabel="AdamW's training time / the optimizer's",
        title=f"{question.parameters / 1e6:,.0f} million parameters, {question.cluster.ranks} GPUs",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend()
    drawing.savefig(path)
    pyplot.close(drawing)
