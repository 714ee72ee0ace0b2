"""Slow networks: the exchange alone and the training of a BERT, against the bandwidth.

    python experiments/network.py             redraw the figure from results/speed/network.csv
    python experiments/network.py --measure   measure what the CSV lacks; needs root; 60 minutes

Clusters of 2 and 4 network namespaces, with gloo and Open MPI, from 50 Mbit/s to 10 Gbit/s and
without a limit: the bandwidths of the paper's Figure 9. Every case is written as soon as it is
measured, so a sweep that was stopped goes on where it was; --fresh starts anew.
"""

import argparse
from itertools import product

import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.bench.drawing import LOOKS, M, size_text
from onebit.lab.bench.measurement import SpeedMeasurement
from onebit.lab.bench.network import contenders, sweep
from onebit.lab.bench.network.sweep import UNLIMITED, Case, Sizes
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements
from onebit.lab.runs.measurements import positive

RATES = (UNLIMITED, 10000.0, 3000.0, 1000.0, 500.0, 200.0, 100.0, 50.0)  # the quickest first
LABELS = {
    "compressed": "1-bit exchange",
    "all_reduce_fp16": "all_reduce, fp16",
    "onebit_adam": "1-bit Adam",
    "onebit_lamb": "1-bit LAMB",
    "zero_one_adam": "0/1 Adam",
    "local_adam": "local Adam",
    "ddp_fp16": "DDP, fp16 hook",
    "ddp_powersgd": "DDP, PowerSGD hook",
}
RIVALS = {"all_reduce": "all_reduce", "ddp_adam": "DDP with Adam"}
UNLIMITED_AT = 3e4  # Mbit/s, where the figure shows what has no limit


# ---- measuring


def cases(options: argparse.Namespace) -> list[Case]:
    """Exchanges with both backends, training with gloo, which PyTorch's hooks need."""
    backends = {"exchange": options.backends, "training": ["gloo"]}
    return [
        Case(part, backend, hosts, options.per_host, rate)
        for rate, part in product(options.rates, options.parts)
        for backend, hosts in product(backends[part], options.hosts)
    ]


def measure(options: argparse.Namespace) -> list[dict]:
    """Measure the cases that the CSV lacks, and write it after each."""
    sizes = Sizes(options.elements, tuple(options.model), options.rounds)
    config = {name: getattr(options, name) for name in RECORDED}
    rows = rows_so_far(options, config)
    wanted = [case for case in cases(options) if not sweep.is_measured(case, rows)]
    for i, case in enumerate(wanted, 1):
        rows += sweep.measure_case(case, sizes)
        facts = MEASUREMENT.facts
        measurements.write(options.results, "speed", MEASUREMENT.name, rows, config, **facts)
        print(f"{i} of {len(wanted)} measured: {case}", flush=True)
    return rows


def rows_so_far(options: argparse.Namespace, config: dict) -> list[dict]:
    """Those of an earlier call with the same sizes; RuntimeError if it had others."""
    if options.fresh:
        return []
    try:
        rows, facts = measurements.read(options.results, "speed", MEASUREMENT.name)
    except FileNotFoundError:
        return []
    now = {name: list(v) if isinstance(v, tuple) else v for name, v in config.items()}
    if facts["config"] != now:
        before = facts["config"]
        raise RuntimeError(f"the CSV was measured with {before}, not {now}: use these, or --fresh")
    return rows.to_dict("records")


# ---- the figure


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """For each part and number of hosts, how many times as fast as the rival."""
    groups = list(rows.groupby(["part", "hosts"]))
    drawing, panels = figures.canvas(len(groups))
    for axes, ((part, hosts), chosen) in zip(panels, groups, strict=True):
        for look, name in enumerate(name for name in LABELS if name in set(chosen.contender)):
            for backend, curve in chosen[chosen.contender == name].groupby("backend"):
                draw(axes, curve, (look + 3 * (backend == "mpi")) % len(LOOKS), backend)
        axes.axhline(1.0, color="0.4", linewidth=0.8)
        axes.set(
            title=f"{part}, {hosts} hosts",
            xlabel="Mbit/s (log scale; rightmost: no limit)",
            ylabel=f"time of {RIVALS[contenders.RIVALS[part]]} / time",
            xscale="log",
            yscale="log",
        )
    figures.legend(drawing)
    return drawing


def draw(axes: Axes, rows: pd.DataFrame, look: int, backend: str) -> None:
    """One contender's gain against the rate."""
    rows = rows.assign(x=rows.rate_mbit.replace(UNLIMITED, UNLIMITED_AT)).sort_values("x")
    colour, line, marker = LOOKS[look]
    style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
    axes.plot(rows.x, 1 / rows.ratio, label=f"{LABELS[rows.contender.iloc[0]]}, {backend}", **style)
    low, high = 1 / rows.ratio_high, 1 / rows.ratio_low
    axes.fill_between(rows.x, low, high, color=colour, alpha=0.2, linewidth=0)


def note(rows: pd.DataFrame, facts: dict) -> str:
    """What the caption says besides."""
    config = facts["config"]
    vocabulary, width, layers, samples, tokens = config["model"]
    return (
        f"Hosts are network namespaces on one machine, {int(rows.per_host.max())} rank on each, "
        "one thread a rank; tc tbf limits what leaves a host, and with more than two hosts what it "
        f"receives. Exchange: of a vector of {size_text(config['elements'])} float32; the rival is "
        "the library's own all_reduce, of Open MPI its ring. Training: a BERT of "
        f"{layers} layers, width {width}, vocabulary {vocabulary}, {samples} x {tokens} tokens a "
        "rank and step; the rival is DistributedDataParallel with fused Adam. 0/1 Adam and local "
        f"Adam exchange every {contenders.PERIOD} steps. Bytes are checked at the interfaces."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The clusters, what is exchanged and what is trained."""
    add, whole = parser.add_argument, positive(int)
    parser.set_defaults(rounds=5)
    add("--parts", nargs="+", choices=contenders.RIVALS, default=list(contenders.RIVALS))
    add("--backends", nargs="+", choices=("gloo", "mpi"), default=["gloo", "mpi"])
    add("--hosts", type=whole, nargs="+", default=[2, 4])
    add("--per-host", type=whole, default=1, help="ranks on a host")
    add("--rates", type=float, nargs="+", default=RATES, help="Mbit/s; 0: no limit")
    add("--elements", type=whole, default=16 * M, help="of the exchanged vector")
    model = ("VOCABULARY", "WIDTH", "LAYERS", "SAMPLES", "TOKENS")
    add("--model", type=whole, nargs=5, default=(8192, 256, 4, 8, 64), metavar=model)
    add("--fresh", action="store_true", help="measure everything anew")


RECORDED = ("elements", "model", "rounds", "seed")
MEASUREMENT = SpeedMeasurement(
    name="network",
    description=__doc__,
    add_options=add_options,
    quick={
        "elements": 2**16,
        "model": (64, 64, 1, 2, 8),
        "rounds": 1,
        "rates": (1000.0, 0.0),
        "hosts": [2],
    },
    recorded=RECORDED,
    measure=measure,
    plot=plot,
    note=note,
)

if __name__ == "__main__":
    MEASUREMENT.main()
