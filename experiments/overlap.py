"""Overlap: how much of the exchange backward hides, on a link of 1 Gbit and on a slower one.

With two ranks on two cores, only waiting can be hidden: what an exchange computes takes the core from backward. So there are two
models: one computed here, and one whose layers leave the CPU idle, as if a GPU computed them.

    python experiments/overlap.py             redraw the figure from results/speed/overlap.csv
    python experiments/overlap.py --measure   measure first, 6 minutes; needs root, or --delay

Two ranks in two network namespaces; each step is forward, backward and optimizer.step() of a stack of linear layers.
"""

import json
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from onebit import OneBitAdam
from onebit.lab.bench import bars as results
from onebit.lab.bench import network
from onebit.lab.bench.timing import InStep, alternate
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements as measured
from onebit.lab.training.workers import Processes

NAME = "overlap"
RANKS = network.ENDS
RIVAL = "ddp_adam"
# name -> (look, label), from top to bottom
LABELS = {
    RIVAL: (1, "DistributedDataParallel,\nfused Adam"),
    "no_overlap": (4, "1-bit Adam"),
    "overlap": (0, "1-bit Adam,\noverlap=True"),
    "compute": (2, "1-bit Adam,\nno network"),
    "exchange": (3, "its exchange alone"),
}
RESAMPLES = 1000
COMPUTED = ("here", "elsewhere")


class Waiting(torch.autograd.Function):
    """x -> x. Each way takes a while in which the CPU is idle; the weight's gradient is there from the start."""

    @staticmethod
    def forward(ctx, x, weight, gradient, seconds):
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.seconds)
        return dy, ctx.gradient, None, None


class Elsewhere(torch.nn.Module):
    """A layer with a weight as large as torch.nn.Linear's, as if computed by a device of its own."""

    def __init__(self, width, seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width))
        self.gradient = torch.randn(width, width)
        self.seconds = seconds

    def forward(self, x):
        return Waiting.apply(x, self.weight, self.gradient, self.seconds)


class Trained:
    """A model with its optimizer; calling it makes one step on one batch.

    make: parameters -> optimizer. wrap: what becomes of the model before it is used.
    """

    def __init__(self, make, options, wrap=lambda model: model):
        torch.manual_seed(options.seed)
        width = options.width
        layer = {
            "here": lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()),
            "elsewhere": lambda: Elsewhere(width, options.layer_ms / 1e3),
        }[options.computed]
        self.x = torch.randn(options.batch, width, requires_grad=True)
        self.model = wrap(torch.nn.Sequential(*(layer() for _ in range(options.layers))))
        self.optimizer = make(self.model.parameters())

    def __call__(self):
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


def onebit(options, communicator, overlap=False):
    """In its compressed phase. The check needs a message between backward and step, which nothing can hide, and it is on by default."""
    trained = Trained(
        lambda parameters: OneBitAdam(
            parameters,
            lr=1e-5,
            warmup=1,
            variance_floor=1e-3,
            bucket_cap_mb=options.bucket_cap_mb,
            overlap=overlap,
            communicator=communicator,
        ),
        options,
    )
    trained()
    assert trained.optimizer.phase == "compressed"
    return trained


def contenders(communicator, options):
    """Name -> a whole step, or a part of one."""
    absent = network.Absent(RANKS)
    made = {
        "no_overlap": onebit(options, communicator),
        "overlap": onebit(options, communicator, overlap=True),
        "compute": onebit(options, absent),
    }
    absent.calls_made.clear()
    made["compute"]()
    made["exchange"] = network.replay(communicator, list(absent.calls_made))
    if not isinstance(
        communicator, network.Delayed
    ):  # what DistributedDataParallel sends cannot be delayed that way
        made[RIVAL] = Trained(
            lambda parameters: torch.optim.Adam(parameters, lr=1e-5, fused=True),
            options,
            lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
        )
    return made


def hidden(timings, seed):
    """Which part of the time that the network costs without overlap is saved by it: from the medians, with a 95% interval.

    The interval resamples the rounds: a ratio of differences of single rounds says nothing, since some differences are near zero.
    """
    overlap, without, compute = (
        timings.seconds[name] for name in ("overlap", "no_overlap", "compute")
    )
    rounds = np.random.default_rng(seed).integers(len(overlap), size=(RESAMPLES, len(overlap)))
    rounds = np.vstack([np.arange(len(overlap)), rounds])  # the first line is no resample
    overlap, without, compute = (
        np.median(seconds[rounds], axis=1) for seconds in (overlap, without, compute)
    )
    parts = 1 - (overlap - compute) / (without - compute)
    low, high = np.percentile(parts[1:], (2.5, 97.5))
    return {"hidden": float(parts[0]), "hidden_low": float(low), "hidden_high": float(high)}


def bytes_sent(name, made):
    """What leaves a rank in a step."""
    if name == RIVAL:
        return 2 * (RANKS - 1) * sum(p.nbytes for p in made[name].model.parameters()) // RANKS
    return (
        0 if name == "compute" else made["no_overlap"].optimizer.communication.last_step.bytes_sent
    )


def measure_as_rank(communicator, turn, options, rate, path):
    """What both ranks do; rank 0 writes the rows."""
    warnings.filterwarnings("ignore", "the variance is frozen")
    mode = "namespaces"
    if options.delay:
        mode, communicator = "delay", network.Delayed(communicator, rate)
    made = contenders(communicator, options)
    timings = alternate(made, options.rounds, pace=InStep())
    rival = RIVAL if RIVAL in made else "no_overlap"
    rows = []
    for name in made:
        sent = bytes_sent(name, made)
        setting = {
            "mode": mode,
            "computed": options.computed,
            "rate_mbit": rate,
            "workers": communicator.size,
            "threads": 1,
            "bytes_sent": sent,
            "wire_ms": 8e-3 * sent / rate,
        }
        extra = (
            hidden(timings, options.seed)
            if name == "overlap"
            else dict.fromkeys(("hidden", "hidden_low", "hidden_high"))
        )
        rows.append({"contender": name, **setting, **timings.summary(name, rival), **extra})
    if communicator.rank == 0:
        path.write_text(json.dumps(rows))


def measure(options):
    """Rows of the CSV, one for each model, rate and contender."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        path = Path(folder, "rows.json")
        for computed, rate in product(COMPUTED, options.rates):
            options.computed = computed
            if options.delay:
                Processes(workers=RANKS, backend="gloo", start="fork").run(
                    partial(measure_as_rank, options=options, rate=rate, path=path)
                )
            else:
                with network.link(rate) as ends:
                    ends.run(
                        [
                            sys.executable,
                            __file__,
                            *sys.argv[1:],
                            "--as-rank",
                            computed,
                            str(rate),
                            str(path),
                        ]
                    )
            rows += json.loads(path.read_text())
            found = next(row["hidden"] for row in rows[::-1] if row["contender"] == "overlap")
            print(
                f"computed {computed}, {rate:g} Mbit: {found:.0%} of what the network costs is hidden",
                flush=True,
            )
    return rows


def plot(rows):
    """For each model and rate the time of a step and of its parts, with whiskers."""
    cases = list(product(COMPUTED, sorted(rows.rate_mbit.unique(), reverse=True)))
    drawing, panels = figures.figure(columns=len(cases) // len(COMPUTED), rows=len(COMPUTED))
    names = [name for name in LABELS if name in set(rows.contender)]
    for axes, (computed, rate) in zip(panels, cases):
        chosen = rows[(rows.computed == computed) & (rows.rate_mbit == rate)].set_index("contender")
        for i, name in enumerate(names):
            draw_time(axes, chosen.loc[name], i, LABELS[name][0])
        overlap = chosen.loc["overlap"]
        axes.set(
            title=f"{rate:g} Mbit/s, computed {computed}:\n{overlap.hidden:.0%} hidden [{overlap.hidden_low:.0%}, {overlap.hidden_high:.0%}]",
            xlabel="milliseconds (log scale)",
            xscale="log",
            ylim=(len(names) - 0.5, -0.7),
        )
        axes.set_yticks(range(len(names)), [LABELS[name][1] for name in names])
        axes.margins(x=0.15)
    return drawing


def draw_time(axes, row, i, look):
    colour, _, marker = results.LOOKS[look]
    whiskers = [[max(row.median_ms - row.low_ms, 0)], [max(row.high_ms - row.median_ms, 0)]]
    axes.errorbar(
        row.median_ms, i, xerr=whiskers, color=colour, marker=marker, markersize=7, capsize=3
    )
    axes.annotate(
        f"{row.median_ms:,.0f} ms",
        (row.median_ms, i),
        (0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    axes.plot([row.wire_ms or np.nan] * 2, [i - 0.25, i + 0.25], color="0.4", linewidth=1)


def note(root):
    try:
        rows, facts = results.read(root, NAME)
    except FileNotFoundError:
        return ""
    config = facts["config"]
    how = {
        "namespaces": "in two network namespaces, the link between them limited by tc tbf",
        "delay": "on loopback, each collective being delayed "
        "as if by such a link (DistributedDataParallel cannot be, so it is left out)",
    }[rows["mode"].iloc[0]]
    return (
        f"{RANKS} gloo processes {how}. Forward, backward and step of {config['layers']} layers of {config['width']} x {config['width']}, "
        f"buckets of {config['bucket_cap_mb']:g} MB, one thread a rank on a machine of {RANKS} cores. Computed here: linear layers, "
        f"{config['batch']} examples a rank, which leave no core for the exchange. Elsewhere: each layer leaves the CPU idle for "
        f"{config['layer_ms']:g} ms each way, as if a GPU computed it. Both ranks start a step together and the slower one counts. Upright line: "
        "how long the link takes for the bytes. Hidden: 1 - (overlap - no network) / (no overlap - no network), of the medians, in brackets its "
        "95% interval by resampling the rounds."
    )


def main():
    made = results.parser(__doc__, rounds=31)
    made.add_argument(
        "--rates",
        type=measured.positive(float),
        nargs="+",
        default=(1000.0, 200.0),
        help="of the link, Mbit/s",
    )
    made.add_argument("--layers", type=measured.positive(int), default=16)
    made.add_argument("--width", type=measured.positive(int), default=1024)
    made.add_argument(
        "--batch",
        type=measured.positive(int),
        default=32,
        help="examples a rank: how long backward takes",
    )
    made.add_argument(
        "--layer-ms",
        type=measured.positive(float),
        default=3.0,
        help="how long a layer takes that is computed elsewhere, each way",
    )
    made.add_argument(
        "--bucket-cap-mb", type=measured.positive(float), default=8.1, help="by default two layers"
    )
    made.add_argument(
        "--delay",
        action="store_true",
        help="an artificial delay instead of namespaces, which need root",
    )
    made.add_argument(
        "--as-rank",
        nargs=3,
        metavar=("COMPUTED", "RATE", "FILE"),
        help="be one rank on the link; the experiment itself uses it",
    )
    options = measured.parse(
        made,
        quick={"layers": 4, "width": 256, "bucket_cap_mb": 0.25, "rates": (1000.0,), "rounds": 1},
    )
    if options.as_rank:
        options.computed, rate, path = (
            options.as_rank[0],
            float(options.as_rank[1]),
            Path(options.as_rank[2]),
        )
        Processes(workers=None, backend="gloo", start="fork").run(
            partial(measure_as_rank, options=options, rate=rate, path=path)
        )
        return
    if options.measure:
        names = (
            "rates",
            "layers",
            "width",
            "batch",
            "layer_ms",
            "bucket_cap_mb",
            "delay",
            "rounds",
            "seed",
        )
        try:
            rows = measure(options)
        except RuntimeError as error:
            raise SystemExit(f"error: {error}") from None
        results.write(options.results, NAME, rows, {name: getattr(options, name) for name in names})
    results.conclude(NAME, options.results, plot, note=note(options.results))


if __name__ == "__main__":
    main()
