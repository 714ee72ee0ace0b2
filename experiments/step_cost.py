"""Step cost: a whole optimizer step of W processes on one machine, with no limit on the network.

    python experiments/step_cost.py             redraw the figure from results/speed/step_cost.csv
    python experiments/step_cost.py --measure   measure first, 15 minutes; 64M elements and W = 4
                                                need 16 GB of memory

The rivals are all_reduce and torch's fused Adam. This is the case that suits compression least: a
message between two processes of one machine costs hardly more than a copy. At one size the steps of
the rest of the family are timed too, each beside the step that it should cost about as much as.
"""

import argparse
import gc
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor

from onebit import DistributedAdam, OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit.comm import Communicator
from onebit.lab.bench.bars import Bar
from onebit.lab.bench.drawing import (
    LOOKS,
    SIZES,
    M,
    draw,
    draw_bar,
    plain_ticks,
    size_axis,
    size_text,
)
from onebit.lab.bench.measurement import SpeedMeasurement
from onebit.lab.bench.timing import InStep, alternate
from onebit.lab.report import figure as figures
from onebit.lab.runs.measurements import positive
from onebit.lab.training.workers import Processes

RANKS = (2, 4)  # W
RIVAL = "allreduce_adam"
LABELS = {
    "onebit": "1-bit Adam",
    RIVAL: "all_reduce, fused Adam",
    "onebit_unchecked": "1-bit Adam, check_finite=False",
}

# The rest of the family: contender -> what its time is divided by.
FAMILY = {
    "fused_adam": RIVAL,  # torch's, without all_reduce
    "exact": RIVAL,  # a step of 1-bit Adam's warm-up, which is DistributedAdam's
    "zero_one_local": "fused_adam",  # a step of 0/1 Adam that sends nothing
    "zero_one_sync": "onebit",  # a step of 0/1 Adam after which it syncs, as after every step
    "onebit_lamb": "onebit",  # a compressed step
}
FAMILY_SIZE = 16 * M

# Written before any run. Ratios of medians in one run.
BARS = tuple(
    Bar(contender, "ratio", at_most, {"n": n, "workers": 2, "tensors": 1})
    for contender, n, at_most in (
        ("onebit", M, 1.2),
        ("onebit", 16 * M, 0.40),
        ("onebit", 64 * M, 0.33),
        ("onebit_unchecked", 16 * M, 0.45),
        ("exact", FAMILY_SIZE, 1.05),
        ("zero_one_local", FAMILY_SIZE, 1.1),
        ("zero_one_sync", FAMILY_SIZE, 1.3),
        ("onebit_lamb", FAMILY_SIZE, 2.0),
    )
)


def bert_shapes(
    layers: int = 12, width: int = 256, words: int = 25_000, positions: int = 512
) -> list[tuple[int, ...]]:
    """The tensors of a BERT encoder, 197 of them, 15 million elements."""
    square, vector, wide = (width, width), (width,), (4 * width,)
    layer = (
        [square, vector] * 4
        + [vector, vector]
        + [(*wide, width), wide, (width, *wide), vector]
        + [vector, vector]
    )
    return [(words, width), (positions, width), (2, width), vector, vector] + layer * layers


def gradient_of(shapes: list[tuple[int, ...]], seed: int) -> tuple[Tensor, list[Tensor]]:
    """(a flat vector without a zero, views of it in these shapes).

    It is one bucket for all tensors, as DistributedDataParallel keeps them.
    """
    numels = [prod(shape) for shape in shapes]
    flat = torch.randn(sum(numels), generator=torch.Generator().manual_seed(seed))
    flat.copysign_(flat).add_(flat.sign(), alpha=0.5)
    return flat, [part.view(shape) for part, shape in zip(flat.split(numels), shapes)]


def parameters_of(gradients: list[Tensor]) -> list[torch.nn.Parameter]:
    """Parameters of zeros with these gradients."""
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g
    return parameters


def contenders(
    shapes: list[tuple[int, ...]], communicator: Communicator, seed: int, with_family: bool
) -> tuple[dict[str, Callable], dict[str, DistributedAdam]]:
    """(name -> a whole step, name -> our optimizers).

    All contenders have the same gradients; rank r's own come from seed + r.
    """
    flat, gradients = gradient_of(shapes, seed + communicator.rank)
    ours = optimizers(gradients, communicator, with_family)
    for name, optimizer in ours.items():  # before the rival, which averages the gradients in place
        for _ in range(LOCAL_FROM if name == "zero_one_local" else 1):
            optimizer.step()
        assert optimizer.phase == ("warmup" if name == "exact" else "compressed")
    adam = torch.optim.Adam(parameters_of(gradients), fused=True)

    def allreduce_adam() -> None:
        dist.all_reduce(flat)
        flat.div_(communicator.size)
        adam.step()

    made: dict[str, Callable] = {RIVAL: allreduce_adam}
    if with_family:
        made["fused_adam"] = torch.optim.Adam(parameters_of(gradients), fused=True).step
    return made | {name: optimizer.step for name, optimizer in ours.items()}, ours


LOCAL_FROM = 40  # the step from which syncs of `zero_one_local`, each twice as late, are rare


def optimizers(
    gradients: list[Tensor], communicator: Communicator, with_family: bool
) -> dict[str, DistributedAdam]:
    """Our contenders by name, before their first step."""

    def make(kind: type[DistributedAdam], **options: object) -> DistributedAdam:
        return kind(parameters_of(gradients), communicator=communicator, **options)

    ours = {
        "onebit": make(OneBitAdam, warmup=1),
        "onebit_unchecked": make(OneBitAdam, warmup=1, check_finite=False),
    }
    if not with_family:
        return ours
    local = {"local_step_scaler": 1, "local_step_clipper": 2**20}
    return ours | {
        "exact": make(DistributedAdam),
        "zero_one_local": make(ZeroOneAdam, variance_freeze_step=1, **local),
        "zero_one_sync": make(ZeroOneAdam, variance_freeze_step=1, local_step_clipper=1),
        "onebit_lamb": make(OneBitLamb, warmup=1),
    }


def sent(name: str, ours: dict[str, DistributedAdam], elements: int, ranks: int) -> int:
    """Bytes that leave a rank in a step."""
    if name in ours:
        return ours[name].communication.last_step.bytes_sent
    return 2 * (ranks - 1) * 4 * elements // ranks if name == RIVAL else 0


def measure_as_rank(
    communicator: Communicator, turn: object, cases: list, options: argparse.Namespace, path: Path
) -> None:
    """What every rank does; rank 0 writes the rows."""
    warnings.filterwarnings("ignore", "the variance is frozen|only 1 coefficients|.*same norm")
    rows = []
    for shapes in cases:
        with_family = shapes == [(options.family,)]
        made, ours = contenders(shapes, communicator, options.seed, with_family)
        timings = alternate(made, options.rounds, pace=InStep())
        n = sum(map(prod, shapes))
        for name in made:
            setting = {
                "contender": name,
                "n": n,
                "tensors": len(shapes),
                "threads": 1,
                "workers": communicator.size,
            }
            setting["bytes_sent"] = sent(name, ours, n, communicator.size)
            rows.append({**setting, **timings.summary(name, FAMILY.get(name, RIVAL))})
        if communicator.rank == 0:
            ratios = ", ".join(
                f"{row['contender']} {row['ratio']:.2f}" for row in rows[-len(made) :]
            )
            print(
                f"W = {communicator.size}, {size_text(n)}, {len(shapes)} tensors: {ratios}",
                flush=True,
            )
        del made, ours
        gc.collect()
    if communicator.rank == 0:
        path.write_text(json.dumps(rows))


def measure(options: argparse.Namespace) -> list[dict]:
    """The rows of the CSV, one for each number of ranks, set of tensors and contender."""
    cases = [[(n,)] for n in options.sizes] + [bert_shapes(*options.bert)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        for ranks in options.ranks:
            path = Path(folder, f"{ranks}.json")
            Processes(workers=ranks, backend="gloo", start="fork").run(
                partial(measure_as_rank, cases=cases, options=options, path=path)
            )
            rows += json.loads(path.read_text())
    return rows


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Time against size for each W, and the ratio to the rival; hollow markers: many tensors."""
    ranks = sorted(rows.workers.unique())
    drawing, panels = figures.canvas(2 * len(ranks), columns=len(ranks))
    for i, count in enumerate(ranks):
        chosen = rows[rows.workers == count]
        draw_panel(panels[i], chosen, ("median_ms", "low_ms", "high_ms"))
        panels[i].set(title=f"A step, W = {count}", ylabel="milliseconds", yscale="log")
        ratio = panels[len(ranks) + i]
        draw_panel(ratio, chosen, ("ratio", "ratio_low", "ratio_high"))
        for bar in BARS:
            of_curve = bar.where["workers"] == count and bar.contender in LABELS
            if of_curve and bar.row(rows) is not None:
                draw_bar(ratio, bar.where["n"], bar.at_most, list(LABELS).index(bar.contender))
        title = f"Against all_reduce and fused Adam, W = {count}"
        ratio.set(title=title, ylabel="ratio of times", yscale="log")
        plain_ticks(ratio, (0.25, 0.5, 1, 2, 4))
    hollow = {"color": "0.3", "marker": "o", "markerfacecolor": "none", "linestyle": "none"}
    tensors = rows.tensors.max()
    panels[0].plot([], [], markersize=8, label=f"hollow: {tensors} tensors of a BERT", **hollow)
    figures.legend(drawing, panels[0])
    return drawing


def draw_panel(axes: Axes, rows: pd.DataFrame, columns: tuple[str, str, str]) -> None:
    """A curve for one tensor of each size, and a hollow marker for many tensors.

    columns: the middle, the low and the high end.
    """
    one, many = rows[rows.tensors == 1], rows[rows.tensors > 1]
    middle, low, high = columns
    for look, (name, label) in enumerate(LABELS.items()):
        draw(axes, one[one.contender == name], look, label, *columns)
        found = many[many.contender == name]
        colour, _, marker = LOOKS[look]
        errors = [found[middle] - found[low], found[high] - found[middle]]
        style = {"color": colour, "marker": marker, "markerfacecolor": "none", "markersize": 8}
        bars = [error.clip(lower=0) for error in errors]
        axes.errorbar(found.n, found[middle], bars, linestyle="", linewidth=1, **style)
    size_axis(axes, one.n.unique())


def note(rows: pd.DataFrame, facts: dict) -> str:
    """What the caption says besides."""
    many = rows[rows.tensors > 1].iloc[0]
    return (
        "W processes on one machine, exchanging over gloo, each with one thread; all start a step "
        "together and the time is that of the slowest. Lines: one fp32 tensor; hollow: "
        f"{many.tensors} tensors of a BERT, {size_text(many.n)} elements in all. A heavy dash with "
        "an arrow is a bar, set before the runs, that the curve of its colour must be under. The "
        "CSV has the rest of the family besides."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes, the numbers of ranks and the many tensors."""
    count = {"type": positive(int), "nargs": "+"}
    parser.add_argument("--sizes", default=SIZES, help="elements of the one tensor", **count)
    parser.add_argument("--ranks", default=RANKS, help="W, each W in turn", **count)
    parser.add_argument(
        "--family",
        type=positive(int),
        default=FAMILY_SIZE,
        help="elements of the one tensor at which the whole family is timed, one of --sizes",
    )
    parser.add_argument(
        "--bert",
        type=positive(int),
        nargs=2,
        default=(12, 256),
        metavar=("LAYERS", "WIDTH"),
        help="of the many tensors",
    )


MEASUREMENT = SpeedMeasurement(
    name="step_cost",
    description=__doc__,
    add_options=add_options,
    quick={"sizes": (2**12,), "family": 2**12, "bert": (1, 8), "rounds": 1},
    recorded=("sizes", "ranks", "family", "bert", "rounds", "seed"),
    measure=measure,
    plot=plot,
    note=note,
    bars=BARS,
)

if __name__ == "__main__":
    MEASUREMENT.main()
