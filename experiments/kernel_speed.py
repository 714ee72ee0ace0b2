"""Kernel speed: the passes over the memory that 1-bit Adam makes, against what the memory's bandwidth allows.

    python experiments/kernel_speed.py             redraw the figure from results/speed/kernel_speed.csv
    python experiments/kernel_speed.py --measure   measure first, 10 minutes

The limit of a pass is the time in which `a += b` on arrays of the same size moves as many bytes as the pass must.
"""

import torch
from matplotlib.axes import Axes

from onebit import kernels
from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Terms
from onebit.lab.bench import bars as results
from onebit.lab.bench.bars import SIZES, Bar, M
from onebit.lab.bench.timing import alternate
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements as measured
from onebit.layout import Layout

NAME = "kernel_speed"
THREADS = (1, 2)
SERVERS = (2, 4)  # W


def server_bytes(ranks):
    """The server's step: reads the bits of W ranks, reads and writes its error, writes bits; for 1 / W of the vector."""
    return (ranks / 8 + 8 + 1 / 8) / ranks


# bytes that must be moved, of fp32, for each element of the whole vector
BYTES = {
    "yardstick": 12.0,  # reads a and b, writes a
    "compress": 12.25,  # reads gradient, packed momentum, compensated vector; writes it, and bits
    "update": 12.125,  # reads packed momentum, variance, parameter; writes it
    "measure": 4.0,
    **{f"yardstick_{ranks}": 12.0 / ranks for ranks in SERVERS},
    **{f"average_{ranks}": server_bytes(ranks) for ranks in SERVERS},
    "torch_tidy": 12.125,  # what its task needs: it is given the momentum ready-made
    "torch_ops": 12.25,
}
FUSED_ADAM = {"parameter": 8.0, "gradient": 4.0, "momentum": 8.0, "variance": 8.0}
LIMIT = {
    f"average_{ranks}": f"yardstick_{ranks}" for ranks in SERVERS
}  # on a chunk's arrays; the others': "yardstick"
RIVALS = {"compress": "torch_tidy", "torch_ops": "torch_tidy"}  # the others': their yardstick

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

    def __init__(self, kernel, partition, z):
        self.kernel, self.partition, self.z = kernel, partition, z
        self.compensated = partition.zeros(torch.float32)
        self.scales = torch.zeros(len(partition.lengths))

    def __call__(self):
        _, self.scales = self.kernel(
            self.partition, self.z, self.compensated, self.scales, self.compensated
        )


class TorchTidy:
    """The same in the plain torch that one would write, with a stored error: m is the vector, e the error."""

    def __init__(self, m):
        self.m, self.e = m, torch.zeros_like(m)
        self.weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)

    def __call__(self):
        c = self.m + self.e
        bits = c >= 0
        scale = c.norm() / c.numel() ** 0.5
        packed = (bits.view(-1, 8) * self.weights).sum(1).to(torch.uint8)
        self.e = c - torch.where(bits, scale, -scale)
        return packed


def random_message(partition):
    """A payload of random signs, uint8 [rows, row_bytes]."""
    bits = torch.randint(256, (partition.size // 8,), dtype=torch.uint8)
    return torch_ops.join_payload(partition, bits, torch.full((len(partition.lengths),), 0.1))


def adding(n):
    """The yardstick, on arrays of its own: it neither warms the cache for others nor finds it warm."""
    a, b = torch.zeros(n), torch.randn(n)
    return lambda: a.add_(b)


def contenders(n, seed):
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
            partition, [parameter], variance, momentum, [1.0], [1e-6], [1e-8]
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


def measure(options):
    """Rows of the CSV, one for each size, number of threads and contender."""
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
            print(
                f"{results.size_text(n)}, threads {threads}: compress {_last_times(rows, 'compress')} of the limit",
                flush=True,
            )
    return rows


def row(timings, name):
    yardstick = LIMIT.get(name, name if name.startswith("yardstick") else "yardstick")
    found = timings.summary(name, RIVALS.get(name, yardstick))
    limit, factor = timings.summary(name, yardstick), BYTES[yardstick] / BYTES[name]
    times = {f"times_limit{end}": factor * limit[f"ratio{end}"] for end in ("", "_low", "_high")}
    return {"bytes_per_element": BYTES[name], **found, **times}


def _last_times(rows, name):
    return f"{next(row['times_limit'] for row in reversed(rows) if row['contender'] == name):.2f} times"


# ---- the figure


def plot(rows):
    """Time against size; times the limit with one thread and two; bytes of a whole step."""
    drawing, (time, one, two, volume) = figures.figure(columns=2, rows=2)
    threads = max(THREADS)
    for look, (name, label) in enumerate(LABELS.items()):
        results.draw(
            time,
            rows[(rows.contender == name) & (rows.threads == threads)],
            look,
            label,
            "median_ms",
            "low_ms",
            "high_ms",
        )
    draw_ratio_bars(time, rows[rows.threads == threads])
    time.set(title=f"Time, {threads} threads", ylabel="milliseconds", yscale="log")
    time.set_ylim(top=100 * time.get_ylim()[1])  # room for the legend
    for axes, count in zip((one, two), THREADS):
        draw_times_limit(axes, rows[rows.threads == count], count)
    for axes in (time, one, two):
        results.size_axis(axes, rows.n.unique())
    time.legend(fontsize=7)
    two.legend(fontsize=7)
    draw_volume(volume)
    return drawing


def draw_ratio_bars(axes: Axes, rows):
    for bar in BARS:
        found = bar.row(rows) if bar.column == "ratio" else None
        if found is not None:
            rival = rows[(rows.contender == found.ratio_to) & (rows.n == found.n)].median_ms.iloc[0]
            results.draw_bar(axes, found.n, bar.at_most * rival, list(LABELS).index(bar.contender))


def draw_times_limit(axes: Axes, rows, threads):
    for look, (name, label) in enumerate(list(LABELS.items())[:5]):
        results.draw(
            axes,
            rows[rows.contender == name],
            look,
            label,
            "times_limit",
            "times_limit_low",
            "times_limit_high",
        )
    for bar in BARS:
        if (
            bar.column == "times_limit"
            and bar.where["threads"] == threads
            and bar.row(rows) is not None
        ):
            results.draw_bar(axes, bar.where["n"], bar.at_most, list(LABELS).index(bar.contender))
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set(
        title=f"Against the bandwidth, {threads} thread{'s' * (threads > 1)}",
        ylabel="times the limit",
        yscale="log",
    )
    results.plain_ticks(axes, (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50))


def draw_volume(axes: Axes):
    """Bytes of memory that a step must move, as stacked bars."""
    ours = {"compress": BYTES["compress"], "update": BYTES["update"]}
    stacks = {
        f"1-bit Adam,\nW = {ranks}": ours
        | {"server": BYTES[f"average_{ranks}"], "check": BYTES["measure"]}
        for ranks in SERVERS
    }
    stacks["fused Adam"] = FUSED_ADAM
    for i, parts in enumerate(stacks.values()):
        bottom = 0.0
        for j, (part, height) in enumerate(parts.items()):
            axes.bar(
                i,
                height,
                bottom=bottom,
                color=results.LOOKS[1 if parts is FUSED_ADAM else 0][0],
                alpha=0.8 - 0.15 * j,
                edgecolor="white",
            )
            axes.text(
                i, bottom + height / 2, f"{part} {height:.4g}", ha="center", va="center", fontsize=8
            )
            bottom += height
        axes.text(i, bottom, f"{bottom:.4g}", ha="center", va="bottom")
    axes.set_xticks(range(len(stacks)), stacks)
    axes.set(
        title="Memory traffic of a step", ylabel="bytes per element, without the exchange's own"
    )
    axes.grid(axis="x", visible=False)


NOTE = (
    "One fp32 tensor. The limit is the time in which a += b, run in the same rounds on arrays of the same size, moves as many bytes. A heavy "
    "dash with an arrow is a bar, set before the runs, that the curve of its colour must be under; in the first panel the bar is against "
    "plain torch."
)


def main():
    made = results.parser(__doc__, rounds=31)
    made.add_argument(
        "--sizes",
        type=measured.positive(int),
        nargs="+",
        default=SIZES,
        help="elements, multiples of 256",
    )
    made.add_argument("--threads", type=measured.positive(int), nargs="+", default=THREADS)
    options = measured.parse(made, quick={"sizes": (2**16,), "rounds": 1})
    if options.measure:
        config = {
            "sizes": list(options.sizes),
            "threads": list(options.threads),
            "rounds": options.rounds,
            "seed": options.seed,
        }
        results.write(options.results, NAME, measure(options), config)
    results.conclude(NAME, options.results, plot, BARS, NOTE)


if __name__ == "__main__":
    main()
