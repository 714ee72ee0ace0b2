"""What all figures share: curves with their spread, the paper's panel, captions, files.

A figure is a file experiments/figure_NN.py with EXPERIMENT, OPTIMIZERS, plot(rows) and, if there is more to say below it, NOTE; see `main`.
A sweep, experiments/sweep_NAME.py, has a caption of its own as well, since the papers have none like it.
"""

import argparse
import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from onebit.lab.report.captions import caption
from onebit.lab.report.style import LOOKS, PAPER_NAMES, POINTS, look
from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.load import (
    PROFILES,
    RESULTS,
    load_records,
    load_rows,
    paper_curve,
    paper_curves,
)
from onebit.lab.runs.metadata import ROOT


def figure(columns: int, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with its axes in reading order."""
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.framealpha": 0.8,
            "legend.edgecolor": "none",
            "legend.fontsize": 8,
            "legend.handlelength": 3.5,
        }
    )
    drawing, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.3 * rows), squeeze=False, layout="constrained"
    )
    return drawing, list(axes.flat)


def curve(rows: pd.DataFrame, x: str, y: str, points: int = POINTS) -> pd.DataFrame:
    """The curve of one optimizer: x, and mean, low and high of y over the seeds, in `points` blocks of steps.

    Low and high are the lowest and highest seed. Steps at which y is not defined are left out.
    """
    rows = rows.dropna(subset=[y])
    block = ((rows.step - 1) * points // rows.total_steps).rename("block")
    seeds = rows.groupby([block, "seed"])[[x, y]].mean()
    blocks = seeds.groupby("block")
    return pd.DataFrame(
        {
            "x": blocks[x].mean(),
            "mean": blocks[y].mean(),
            "low": blocks[y].min(),
            "high": blocks[y].max(),
        }
    )


def draw(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, x_scale: float = 1.0, legend: bool = True
) -> None:
    """One line and band per optimizer of `rows` against x / x_scale, of the runs that finished; a live run is a thin line over them.

    A run that diverged is a thin line up to where it leaves the range of those that finished.
    """
    shown = within_range(rows.dropna(subset=[y]), y)
    live_rows = rows[rows.live.astype(bool)]
    for optimizer in [name for name in LOOKS if name in set(rows.optimizer)]:
        chosen = rows[rows.optimizer == optimizer]
        committed, live = (
            chosen[~chosen.live.astype(bool)],
            live_rows[live_rows.optimizer == optimizer],
        )
        name = LOOKS[optimizer][0]
        drawn = shown.loc[shown.index.intersection(chosen.index)]
        for _, run in drawn[~drawn.live.astype(bool) & (drawn.status == "diverged")].groupby(
            "seed"
        ):
            line = curve(run, x, y)
            axes.plot(
                line.x / x_scale,
                line["mean"],
                **{**look(optimizer, None), "linewidth": 0.7, "markersize": 2},
            )
        if len(committed):
            line = curve(committed[committed.status == "finished"], x, y)
            axes.plot(
                line.x / x_scale,
                line["mean"],
                **look(optimizer, f"{name}, {seeds_text(committed)}"),
            )
            axes.fill_between(
                line.x / x_scale,
                line.low,
                line.high,
                color=LOOKS[optimizer][1],
                alpha=0.2,
                linewidth=0,
            )
        if len(live):
            line = curve(drawn[drawn.live.astype(bool)], x, y)
            label = None if len(committed) else f"{name}, live"
            axes.plot(
                line.x / x_scale,
                line["mean"],
                **{**look(optimizer, label), "linewidth": 0.7, "markersize": 2},
            )
    if len(live_rows):
        axes.plot(
            [], [], color="0.3", linewidth=0.7, label=f"thin: live, seed {live_rows.seed.iloc[0]}"
        )
    if legend:
        axes.legend()


def within_range(rows: pd.DataFrame, y: str) -> pd.DataFrame:
    """The rows without those of diverged runs from where y exceeds all that finished runs have, or is not finite."""
    highest = rows[rows.status == "finished"][y].max()
    beyond = (rows.status == "diverged") & ~(
        (rows[y] <= highest) | (np.isnan(highest) & np.isfinite(rows[y]))
    )
    return rows[~beyond.groupby([rows.live, rows.optimizer, rows.seed]).cummax()]


def seeds_text(rows: pd.DataFrame) -> str:
    """'n = 3 seeds', 'n = 2 seeds, 1 of 3 diverged' or 'all 3 seeds diverged'."""
    seeds, finished = rows.seed.nunique(), rows[rows.status == "finished"].seed.nunique()
    if not finished:
        return f"all {seeds} seeds diverged" if seeds > 1 else "diverged"
    diverged = f", {seeds - finished} of {seeds} diverged" if finished < seeds else ""
    return f"n = {finished} seed{'s' * (finished != 1)}{diverged}"


def loss_and_accuracy(rows: pd.DataFrame, number: int) -> Figure:
    """Training loss and test accuracy against samples: ours above, the paper's Figure `number` below."""
    drawing, axes = figure(columns=2, rows=2)
    drawn = (("a", "loss", "training loss"), ("b", "test_accuracy", "test accuracy (%)"))
    for ours, papers, (part, y, label) in zip(axes[:2], axes[2:], drawn, strict=True):
        draw(ours, rows, "samples", y, x_scale=1e3, legend=part == "b")
        ours.set(title="Ours", xlabel="samples (thousands)", ylabel=label)
        draw_paper(papers, f"fig{number}{part}", paper_curves(f"fig{number}{part}"))
        papers.set(
            title=f"The paper's Figure {number}{part}", xlabel="samples (millions)", ylabel=label
        )
    for losses in (axes[0], axes[2]):
        log_scale(losses)
    return drawing


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis; with numbers between its powers of ten if it has hardly one."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def draw_paper(axes: Axes, name: str, curves: tuple[str, ...]) -> None:
    """The paper's digitised curves, each in the look of its optimizer."""
    for paper_name in sorted(curves, key=lambda curve: list(LOOKS).index(PAPER_NAMES[curve])):
        points = paper_curve(name, paper_name)
        optimizer = PAPER_NAMES[paper_name]
        axes.plot(points.x, points.y, **look(optimizer, f"{LOOKS[optimizer][0]} (paper)"))
    axes.legend()


def mark_freeze(axes: Axes, x: float, text: str) -> None:
    """A vertical line at T_w."""
    axes.axvline(x, color="0.4", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.annotate(
        text,
        (x, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="0.3",
    )


def freeze_step(rows: pd.DataFrame) -> int:
    """T_w of the 1-bit Adam runs."""
    return int(rows[rows.optimizer == "onebit_adam"].warmup_steps.iloc[0])


def target(name: str) -> str:
    """The make target of a file of experiments/: figure_04 -> figure-4, figure_zero_one_adam -> figure-zero-one-adam."""
    kind, _, rest = name.partition("_")
    return f"{kind}-{int(rest) if rest.isdigit() else rest.replace('_', '-')}"


def load_figure(name: str) -> ModuleType:
    """The module experiments/<name>.py, e.g. figure_04."""
    path = ROOT / "experiments" / f"{name}.py"
    if not path.exists():
        there = ", ".join(
            sorted(
                p.stem
                for kind in ("figure", "sweep", "table")
                for p in path.parent.glob(f"{kind}_*.py")
            )
        )
        raise ValueError(f"there is no experiment {name!r}; there are {there}")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(
    module: ModuleType, name: str, profile: str, root: Path, live_root: Path | None = None
) -> Path:
    """Draw plot(rows) of the committed runs under `root`, and of live ones under `live_root`, to figures/<name>.png and .pdf.

    A live run may have read other data than the committed ones, such as another Python's documentation.
    """
    records = load_records(root, module.EXPERIMENT, profile, module.OPTIMIZERS)
    live = (
        load_records(live_root, module.EXPERIMENT, profile, module.OPTIMIZERS) if live_root else []
    )
    for group in (records, live):
        require_alike(group)
    require_alike(records + live, apart_from=("corpus_sha256", "data"))
    frames = [load_rows(found, live=found is live) for found in (records, live) if found]
    if not frames:
        raise no_runs(name, module.EXPERIMENT, profile, root)
    rows = pd.concat(frames, ignore_index=True)
    drawing = module.plot(rows)
    path = (live_root or root) / "figures" / (name if profile == "laptop" else f"{name}_{profile}")
    told = getattr(module, "caption", caption)(rows, records + live)
    return write(drawing, " ".join(filter(None, (told, getattr(module, "NOTE", "")))), path)


def no_runs(name: str, experiment: str, profile: str, root: Path) -> FileNotFoundError:
    remedy = (
        f"plan-{target(name)} PROFILE=paper says how to launch"
        if profile == "paper"
        else f"reproduce-{target(name)} PROFILE={profile} makes"
    )
    return FileNotFoundError(
        f"no finished runs of {experiment}, profile {profile}, under {root}: make {remedy} them"
    )


def write(drawing: Figure, text: str, path: Path) -> Path:
    """The figure over its caption, as path.png and .pdf; returns the former."""
    drawing.text(
        0.01,
        -0.01,
        "\n".join(textwrap.wrap(text, int(15.5 * drawing.get_figwidth()))),
        va="top",
        fontsize=8,
        color="0.25",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without dates in them, the same CSV gives the same files.
    drawing.savefig(
        path.with_suffix(".png"), dpi=150, bbox_inches="tight", metadata={"Software": None}
    )
    drawing.savefig(
        path.with_suffix(".pdf"),
        bbox_inches="tight",
        metadata={"CreationDate": None, "ModDate": None},
    )
    plt.close(drawing)
    return path.with_suffix(".png")


def main(file: str, save: Callable = save) -> None:
    """Redraw the figure, or write the table, of an experiments file from the committed CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--profile", default="laptop", choices=PROFILES)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder that holds runs/ and figures/"
    )
    options = parser.parse_args()
    name = Path(file).stem
    try:
        print(save(load_figure(name), name, options.profile, options.results))
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
