"""Step cost: a whole optimizer step of W processes on one machine, against all_reduce and torch's fused Adam. Nothing limits the network.

    python experiments/step_cost.py             redraw the figure from results/speed/step_cost.csv
    python experiments/step_cost.py --measure   measure first, 15 minutes; 64M elements and W = 4 need 16 GB of memory

It is the case that suits compression least: a message between two processes of one machine costs hardly more than a copy.
"""

import gc
import json
import tempfile
import warnings
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from onebit import OneBitAdam
from onebit.lab.bench import bars as results
from onebit.lab.bench.bars import SIZES, Bar, M
from onebit.lab.bench.timing import InStep, alternate
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements as measured
from onebit.lab.training.workers import Processes

NAME = "step_cost"
RANKS = (2, 4)  # W
RIVAL = "allreduce_adam"
LABELS = {
    "onebit": "1-bit Adam",
    RIVAL: "all_reduce, fused Adam",
    "onebit_unchecked": "1-bit Adam, check_finite=False",
}

# Written before any run. Ratios of medians in one run.
BARS = tuple(
    Bar(contender, "ratio", at_most, {"n": n, "workers": 2, "tensors": 1})
    for contender, n, at_most in (
        ("onebit", M, 1.2),
        ("onebit", 16 * M, 0.55),
        ("onebit", 64 * M, 0.45),
        ("onebit_unchecked", 16 * M, 0.45),
    )
)


def bert_shapes(layers=12, width=256, words=25_000, positions=512):
    """The tensors of a BERT encoder, 197 of them, 15 million elements."""
    square, vector, wide = (width, width), (width,), (4 * width,)
    layer = (
        [square, vector] * 4
        + [vector, vector]
        + [(*wide, width), wide, (width, *wide), vector]
        + [vector, vector]
    )
    return [(words, width), (positions, width), (2, width), vector, vector] + layer * layers


def gradient_of(shapes, seed):
    """(a flat vector without a zero, views of it in these shapes): buckets as DistributedDataParallel keeps them, one for all."""
    numels = [prod(shape) for shape in shapes]
    flat = torch.randn(sum(numels), generator=torch.Generator().manual_seed(seed))
    flat.copysign_(flat).add_(flat.sign(), alpha=0.5)
    return flat, [part.view(shape) for part, shape in zip(flat.split(numels), shapes)]


def parameters_of(gradients):
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g
    return parameters


def contenders(shapes, communicator, seed):
    """Name -> a whole step. All have the same gradients; rank r's own come from seed + r."""
    flat, gradients = gradient_of(shapes, seed + communicator.rank)
    ours = {
        "onebit": OneBitAdam(parameters_of(gradients), warmup=1, communicator=communicator),
        "onebit_unchecked": OneBitAdam(
            parameters_of(gradients), warmup=1, check_finite=False, communicator=communicator
        ),
    }
    for optimizer in ours.values():  # before the rival, which averages the gradients in place
        optimizer.step()
        assert optimizer.phase == "compressed"
    adam = torch.optim.Adam(parameters_of(gradients), fused=True)

    def allreduce_adam():
        dist.all_reduce(flat)
        flat.div_(communicator.size)
        adam.step()

    return {RIVAL: allreduce_adam} | {
        name: optimizer.step for name, optimizer in ours.items()
    }, ours


def sent(name, ours, elements, ranks):
    """Bytes that leave a rank in a step."""
    if name == RIVAL:
        return 2 * (ranks - 1) * 4 * elements // ranks
    return ours[name].communication.last_step.bytes_sent


def measure_as_rank(communicator, turn, cases, options, path):
    """What every rank does; rank 0 writes the rows."""
    warnings.filterwarnings("ignore", "the variance is frozen|.*had so little gradient")
    rows = []
    for shapes in cases:
        made, ours = contenders(shapes, communicator, options.seed)
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
            rows.append(
                {
                    **setting,
                    "bytes_sent": sent(name, ours, n, communicator.size),
                    **timings.summary(name, RIVAL),
                }
            )
        if communicator.rank == 0:
            print(
                f"W = {communicator.size}, {results.size_text(n)}, {len(shapes)} tensors: ratio {rows[-2]['ratio']:.2f}",
                flush=True,
            )
        del made, ours
        gc.collect()
    if communicator.rank == 0:
        path.write_text(json.dumps(rows))


def measure(options):
    """Rows of the CSV, one for each number of ranks, set of tensors and contender."""
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


def plot(rows):
    """Time against size for each W, and the ratio to the rival with its spread; hollow markers: many tensors."""
    ranks = sorted(rows.workers.unique())
    drawing, panels = figures.figure(columns=len(ranks), rows=2)
    for i, count in enumerate(ranks):
        chosen = rows[rows.workers == count]
        draw_panel(panels[i], chosen, ("median_ms", "low_ms", "high_ms"))
        panels[i].set(title=f"A step, W = {count}", ylabel="milliseconds", yscale="log")
        ratio = panels[len(ranks) + i]
        draw_panel(ratio, chosen, ("ratio", "ratio_low", "ratio_high"))
        for bar in BARS:
            if bar.where["workers"] == count and bar.row(rows) is not None:
                results.draw_bar(
                    ratio, bar.where["n"], bar.at_most, list(LABELS).index(bar.contender)
                )
        ratio.set(
            title=f"Against all_reduce and fused Adam, W = {count}",
            ylabel="ratio of times",
            yscale="log",
        )
        results.plain_ticks(ratio, (0.25, 0.5, 1, 2, 4))
    panels[0].legend()
    return drawing


def draw_panel(axes, rows, columns):
    one, many = rows[rows.tensors == 1], rows[rows.tensors > 1]
    for look, (name, label) in enumerate(LABELS.items()):
        results.draw(axes, one[one.contender == name], look, label, *columns)
        found = many[many.contender == name]
        colour, _, marker = results.LOOKS[look]
        errors = [found[columns[0]] - found[columns[1]], found[columns[2]] - found[columns[0]]]
        axes.errorbar(
            found.n,
            found[columns[0]],
            [error.clip(lower=0) for error in errors],
            color=colour,
            marker=marker,
            markersize=8,
            markerfacecolor="none",
            linestyle="",
            linewidth=1,
        )
    results.size_axis(axes, one.n.unique())


def note(root):
    try:
        rows, _ = results.read(root, NAME)
    except FileNotFoundError:
        return ""
    many = rows[rows.tensors > 1].iloc[0]
    return (
        f"W gloo processes on loopback, one thread each, all starting a step together; the time is that of the slowest. Lines: one fp32 tensor; "
        f"hollow: {many.tensors} tensors of a BERT, {results.size_text(many.n)} elements in all. A heavy dash with an arrow is a bar, set before "
        "the runs, that the curve of its colour must be under."
    )


def main():
    made = results.parser(__doc__, rounds=31)
    made.add_argument(
        "--sizes",
        type=measured.positive(int),
        nargs="+",
        default=SIZES,
        help="elements of the one tensor",
    )
    made.add_argument(
        "--ranks", type=measured.positive(int), nargs="+", default=RANKS, help="W, each W in turn"
    )
    made.add_argument(
        "--bert",
        type=measured.positive(int),
        nargs=2,
        default=(12, 256),
        metavar=("LAYERS", "WIDTH"),
        help="of the many tensors",
    )
    options = measured.parse(made, quick={"sizes": (2**12,), "bert": (1, 8), "rounds": 1})
    if options.measure:
        config = {name: list(getattr(options, name)) for name in ("sizes", "ranks", "bert")} | {
            "rounds": options.rounds,
            "seed": options.seed,
        }
        results.write(options.results, NAME, measure(options), config)
    results.conclude(NAME, options.results, plot, BARS, note(options.results))


if __name__ == "__main__":
    main()
