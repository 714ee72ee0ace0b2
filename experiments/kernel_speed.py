"""Kernel speed: the passes over the memory that 1-bit Adam makes, against the memory's bandwidth.

    python experiments/kernel_speed.py             redraw the figure from results/speed
    python experiments/kernel_speed.py --measure   measure first, 10 minutes

The limit of a pass is the time in which `a += b` on arrays of the same size moves as many bytes as
the pass must.
"""

import argparse
from collections.abc import Callable

import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from onebit import kernels
from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Terms
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
from onebit.lab.bench.timing import Timings, alternate
from onebit.lab.report import figure as figures
from onebit.lab.runs.measurements import positive
from onebit.layout import Layout, Partition

THREADS = (1, 2)
SERVERS = (2, 4)  # W


def server_bytes(ranks: int) -> float:
    """The bytes of the server's step, which has 1 / W of the vector.

    It reads the bits of W ranks, reads and writes its error, and writes bits.
    """
    return (ranks / 8 + 8 + 1 / 8) / ranks


# bytes that must be moved, of fp32, for each element of the whole vector
BYTES = {
    "yardstick": 12.0,  # reads a and b, writes a
    "compress": 12.25,  # reads gradient, packed momentum, compensated vector; writes it and bits
    "update": 12.125,  # reads packed momentum, variance, parameter; writes it
    "measure": 4.0,
    **{f"yardstick_{ranks}": 12.0 / ranks for ranks in SERVERS},
    **{f"average_{ranks}": server_bytes(ranks) for ranks in SERVERS},
    "torch_tidy": 12.125,  # what its task needs: it is given the momentum ready-made
    "torch_ops": 12.25,
}
FUSED_ADAM = {"parameter": 8.0, "gradient": 4.0, "momentum": 8.0, "variance": 8.0}
# The yardstick of the server's step has a chunk's arrays; that of all others is "yardstick".
LIMIT = {f"average_{ranks}": f"yardstick_{ranks}" for ranks in SERVERS}
# What each is compared with; all others are compared with their yardstick.
RIVALS = {"compress": "torch_tidy", "torch_ops": "torch_tidy"}

# Written before any run. Ratios of medians in one run; one thread has no bar against the bandwidth.
BARS = (
    *(Bar("compress", "times_limit", 1.35, {"n": n, "threads": 2}) for n in (16 * M, 64 * M)),
    *(Bar("update", "times_limit", 1.35, {"n": n, "threads": 2}) for n in (16 * M, 64 * M)),
    *(Bar("average_2", "times_limit", 1.6, {"n": n, "threads": 2}) for n in (16 * M, 64 * M)),
    *(Bar("average_4", "times_limit", 1.8, {"n": n, "threads": 2}) for n in (16 * M, 64 * M)),
    *(
        Bar("compress", "ratio", 1 / 12, {"n": n, "threads": threads})
        for threads in THREADS
        for n in (16 * M, 64 * M)
    ),
    *(Bar("compress", "ratio", 1.0, {"n": M // 16, "threads": threads}) for threads in THREADS),
)
LABELS = {
    "compress": "compress",
    "update": "update",
    "average_2": "server, W = 2",
    "average_4": "server, W = 4",
    "measure": "check",
    "torch_tidy": "compress, plain torch",
    "torch_ops": "compress, our readable torch",
}


class Compression:
    """A vector that is compressed again and again, with the error that stays behind.

    kernel: `compress` or `average` of a kernels module. z: their second argument.
    """

    def __init__(self, kernel: Callable, partition: Partition, z: object):
        self.kernel, self.partition, self.z = kernel, partition, z
        self.compensated = partition.zeros(torch.float32)
        self.scales = torch.zeros(len(partition.lengths))

    def __call__(self) -> None:
        _, self.scales = self.kernel(
            self.partition, self.z, self.compensated, self.scales, self.compensated
        )


class TorchTidy:
    """The same in the plain torch that one would write: m is the vector, e its stored error."""

    def __init__(self, m: Tensor):
        self.m, self.e = m, torch.zeros_like(m)
        self.weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)

    def __call__(self) -> Tensor:
        c = self.m + self.e
        bits = c >= 0
        scale = c.norm() / c.numel() ** 0.5
        packed = (bits.view(-1, 8) * self.weights).sum(1).to(torch.uint8)
        self.e = c - torch.where(bits, scale, -scale)
        return packed


def random_message(partition: Partition) -> Tensor:
    """A payload of random signs, uint8 [rows, row_bytes]."""
    bits = torch.randint(256, (partition.size // 8,), dtype=torch.uint8)
    return torch_ops.join_payload(partition, bits, torch.full((len(partition.lengths),), 0.1))


def adding(n: int) -> Callable[[], Tensor]:
    """The yardstick, on arrays of its own, so that it shares no cache with the others."""
    a, b = torch.zeros(n), torch.randn(n)
    return lambda: a.add_(b)


def contenders(n: int, seed: int) -> dict[str, Callable]:
    """Name -> a call, on one tensor of n elements."""
    torch.manual_seed(seed)
    fast = kernels.for_device("cpu")
    gradient, parameter, variance = torch.randn(n), torch.randn(n), torch.rand(n) + 0.1
    partition = Layout([(n,)], SERVERS[0]).worker_partition()
    momentum = random_message(partition)
    terms = Terms([gradient], [0.1], momentum, [0.9])
    made = {
        "yardstick": adding(n),
        "compress": Compression(fast.compress, partition, terms),
        "update": lambda: fast.update(
            partition, [parameter], variance, momentum, [1.0], [1e-6], [1e-8], [3.16e-6]
        ),
        "measure": lambda: fast.measure(partition, [gradient]),
        "torch_tidy": TorchTidy(torch.randn(n)),
        "torch_ops": Compression(torch_ops.compress, partition, terms),
    }
    for ranks in SERVERS:
        layout = Layout([(n,)], ranks)
        server = layout.server_partition(0, layout.worker_partition())
        received = torch.cat([random_message(server) for _ in range(ranks)])
        made |= {
            f"yardstick_{ranks}": adding(server.size),
            f"average_{ranks}": Compression(fast.average, server, received),
        }
    return made


def measure(options: argparse.Namespace) -> list[dict]:
    """The rows of the CSV, one for each size, number of threads and contender."""
    rows = []
    for n in options.sizes:
        made = contenders(n, options.seed)
        for threads in options.threads:
            torch.set_num_threads(threads)
            timings = alternate(made, options.rounds)
            rows += [
                {"contender": name, "n": n, "threads": threads, **row(timings, name)}
                for name in made
            ]
            times = next(row for row in reversed(rows) if row["contender"] == "compress")
            print(
                f"{size_text(n)}, threads {threads}: compress takes {times['times_limit']:.2f} "
                "times the limit",
                flush=True,
            )
    return rows


def row(timings: Timings, name: str) -> dict:
    """The columns of one contender."""
    yardstick = LIMIT.get(name, name if name.startswith("yardstick") else "yardstick")
    found = timings.summary(name, RIVALS.get(name, yardstick))
    limit, factor = timings.summary(name, yardstick), BYTES[yardstick] / BYTES[name]
    times = {f"times_limit{end}": factor * limit[f"ratio{end}"] for end in ("", "_low", "_high")}
    return {"bytes_per_element": BYTES[name], **found, **times}


# ---- the figure


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Time against size; times the limit with one thread and two; bytes of a whole step."""
    drawing, (time, volume, one, two) = figures.canvas(4)
    threads = max(THREADS)
    for look, (name, label) in enumerate(LABELS.items()):
        chosen = rows[(rows.contender == name) & (rows.threads == threads)]
        draw(time, chosen, look, label, "median_ms", "low_ms", "high_ms")
    draw_ratio_bars(time, rows[rows.threads == threads])
    time.set(title=f"Time, {threads} threads", ylabel="milliseconds", yscale="log")
    for axes, count in zip((one, two), THREADS):
        draw_times_limit(axes, rows[rows.threads == count], count)
    for axes in (time, one, two):
        size_axis(axes, rows.n.unique())
    draw_volume(volume)
    figures.legend(drawing, time, columns=3)
    return drawing


def draw_ratio_bars(axes: Axes, rows: pd.DataFrame) -> None:
    """The bars against plain torch."""
    for bar in BARS:
        found = bar.row(rows) if bar.column == "ratio" else None
        if found is not None:
            rival = rows[(rows.contender == found.ratio_to) & (rows.n == found.n)].median_ms.iloc[0]
            draw_bar(axes, found.n, bar.at_most * rival, list(LABELS).index(bar.contender))


def draw_times_limit(axes: Axes, rows: pd.DataFrame, threads: int) -> None:
    """Each kernel's time as a multiple of its limit, and the bars on it."""
    columns = ("times_limit", "times_limit_low", "times_limit_high")
    for look, (name, label) in enumerate(list(LABELS.items())[:5]):
        draw(axes, rows[rows.contender == name], look, label, *columns)
    for bar in BARS:
        is_here = bar.column == "times_limit" and bar.where["threads"] == threads
        if is_here and bar.row(rows) is not None:
            draw_bar(axes, bar.where["n"], bar.at_most, list(LABELS).index(bar.contender))
    axes.axhline(1, color="0.4", linewidth=0.8)
    title = f"Against the bandwidth, {threads} thread{'s' * (threads > 1)}"
    axes.set(title=title, ylabel="times the limit", yscale="log")
    plain_ticks(axes, (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50))


def draw_volume(axes: Axes) -> None:
    """Bytes of memory that a step must move, as stacked bars."""
    ours = {"compress": BYTES["compress"], "update": BYTES["update"]}
    stacks = {
        f"1-bit Adam,\nW = {ranks}": ours
        | {"server": BYTES[f"average_{ranks}"], "check": BYTES["measure"]}
        for ranks in SERVERS
    }
    stacks["fused Adam"] = FUSED_ADAM
    for i, parts in enumerate(stacks.values()):
        colour, bottom = LOOKS[1 if parts is FUSED_ADAM else 0][0], 0.0
        for j, (part, height) in enumerate(parts.items()):
            style = {"color": colour, "alpha": 0.8 - 0.15 * j, "edgecolor": "white"}
            axes.bar(i, height, bottom=bottom, **style)
            middle = (i, bottom + height / 2)
            axes.text(*middle, f"{part} {height:.4g}", ha="center", va="center", fontsize=7)
            bottom += height
        axes.text(i, bottom, f"{bottom:.4g}", ha="center", va="bottom")
    axes.set_xticks(range(len(stacks)), stacks)
    axes.set(title="Memory traffic of a step", ylabel="bytes per element")
    axes.grid(axis="x", visible=False)


NOTE = (
    "One fp32 tensor. The limit is the time in which a += b, run in the same rounds on arrays of "
    "the same size, moves as many bytes. A heavy dash with an arrow is a bar, set before the runs, "
    "that the curve of its colour must be under; in the first panel the bar is against plain "
    "torch. The memory traffic is without the exchange's own."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes and the numbers of threads."""
    count = {"type": positive(int), "nargs": "+"}
    parser.add_argument("--sizes", default=SIZES, help="elements, multiples of 256", **count)
    parser.add_argument("--threads", default=THREADS, **count)


MEASUREMENT = SpeedMeasurement(
    name="kernel_speed",
    description=__doc__,
    add_options=add_options,
    quick={"sizes": (2**16,), "rounds": 1},
    recorded=("sizes", "threads", "rounds", "seed"),
    measure=measure,
    plot=plot,
    note=lambda rows, facts: NOTE,
    bars=BARS,
)

if __name__ == "__main__":
    MEASUREMENT.main()
