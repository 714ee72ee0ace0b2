"""Overlap: how much of the exchange backward hides, on a link of 1 Gbit and on a slower one.

With two ranks on two cores, only waiting can be hidden: what an exchange computes takes the core
from backward. So there are two models: one computed here, and one whose layers leave the CPU idle,
as if a GPU computed them.

    python experiments/overlap.py             redraw the figure from results/speed/overlap.csv
    python experiments/overlap.py --measure   measure first, 6 minutes; needs root, or --delay

Two ranks run in two network namespaces; each step is forward, backward and optimizer.step() of a
stack of linear layers.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onebit import OneBitAdam
from onebit.comm import Communicator
from onebit.lab.bench import network
from onebit.lab.bench.drawing import LOOKS
from onebit.lab.bench.measurement import SpeedMeasurement
from onebit.lab.bench.timing import InStep, Timings, alternate
from onebit.lab.report import figure as figures
from onebit.lab.runs.measurements import positive
from onebit.lab.training.workers import Processes

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
AS_RANK = "--as-rank"  # how this file calls itself to be one rank on a link


class Waiting(torch.autograd.Function):
    """x -> x, each way taking a while in which the CPU is idle.

    The weight's gradient is there from the start.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        time.sleep(ctx.seconds)
        return dy, ctx.gradient, None, None


class Elsewhere(torch.nn.Module):
    """A layer like torch.nn.Linear, as if a device of its own computed it."""

    def __init__(self, width: int, seconds: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width))
        self.gradient = torch.randn(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Waiting.apply(x, self.weight, self.gradient, self.seconds)


class Trained:
    """A model with its optimizer; calling it makes one step on one batch.

    Args:
        make: parameters -> optimizer.
        wrap: what becomes of the model before it is used.
    """

    def __init__(
        self,
        make: Callable,
        options: argparse.Namespace,
        wrap: Callable = lambda model: model,
    ):
        torch.manual_seed(options.seed)
        width = options.width
        layer = {
            "here": lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()),
            "elsewhere": lambda: Elsewhere(width, options.layer_ms / 1e3),
        }[options.computed]
        self.x = torch.randn(options.batch, width, requires_grad=True)
        self.model = wrap(torch.nn.Sequential(*(layer() for _ in range(options.layers))))
        self.optimizer = make(self.model.parameters())

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


def onebit(
    options: argparse.Namespace, communicator: Communicator, overlap: bool = False
) -> Trained:
    """1-bit Adam in its compressed phase.

    Its check of the gradients, which is on by default, needs a message between backward and step
    that nothing can hide.
    """
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


def contenders(communicator: Communicator, options: argparse.Namespace) -> dict[str, Callable]:
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
    # What DistributedDataParallel sends cannot be delayed by a communicator of ours.
    if not isinstance(communicator, network.Delayed):
        made[RIVAL] = Trained(
            lambda parameters: torch.optim.Adam(parameters, lr=1e-5, fused=True),
            options,
            lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
        )
    return made


def hidden(timings: Timings, seed: int) -> dict[str, float]:
    """The part of the network's time without overlap that overlap saves, with a 95% interval.

    It is computed from the medians, and the interval resamples the rounds: a ratio of differences
    of single rounds says nothing, since some differences are near zero.
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


def bytes_sent(name: str, made: dict[str, Callable]) -> int:
    """The bytes that leave a rank in a step."""
    if name == RIVAL:
        return 2 * (RANKS - 1) * sum(p.nbytes for p in made[name].model.parameters()) // RANKS
    return (
        0 if name == "compute" else made["no_overlap"].optimizer.communication.last_step.bytes_sent
    )


def measure_as_rank(
    communicator: Communicator, turn: object, options: argparse.Namespace, rate: float, path: Path
) -> None:
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
        extra = dict.fromkeys(("hidden", "hidden_low", "hidden_high"))
        if name == "overlap":
            extra = hidden(timings, options.seed)
        rows.append({"contender": name, **setting, **timings.summary(name, rival), **extra})
    if communicator.rank == 0:
        path.write_text(json.dumps(rows))


def measure(options: argparse.Namespace) -> list[dict]:
    """The rows of the CSV, one for each model, rate and contender."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        for computed, rate in product(COMPUTED, options.rates):
            found = measure_setting(options, computed, rate, Path(folder))
            rows += found
            hidden = next(row["hidden"] for row in found if row["contender"] == "overlap")
            print(
                f"computed {computed}, {rate:g} Mbit: {hidden:.0%} of what the network costs is "
                "hidden",
                flush=True,
            )
    return rows


def measure_setting(
    options: argparse.Namespace, computed: str, rate: float, folder: Path
) -> list[dict]:
    """The rows of one model and rate, measured by two processes."""
    path, setting = folder / "rows.json", folder / "setting.json"
    kept = {name: getattr(options, name) for name in RECORDED}
    setting.write_text(json.dumps({**kept, "computed": computed, "rate": rate, "path": str(path)}))
    if options.delay:
        be_ranks(setting, workers=RANKS)
    else:
        with network.link(rate) as ends:
            ends.run([sys.executable, __file__, AS_RANK, str(setting)])
    return json.loads(path.read_text())


def be_ranks(setting: Path, workers: int | None = None) -> None:
    """Be one rank on the link, or, with a number of workers, start all of them."""
    options = argparse.Namespace(**json.loads(setting.read_text()))
    task = partial(measure_as_rank, options=options, rate=options.rate, path=Path(options.path))
    Processes(workers=workers, backend="gloo", start="fork").run(task)


# ---- the figure


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """For each model and rate the time of a step and of its parts, with whiskers."""
    cases = list(product(COMPUTED, sorted(rows.rate_mbit.unique(), reverse=True)))
    drawing, panels = figures.canvas(len(cases), columns=len(cases) // len(COMPUTED))
    names = [name for name in LABELS if name in set(rows.contender)]
    for axes, (computed, rate) in zip(panels, cases):
        chosen = rows[(rows.computed == computed) & (rows.rate_mbit == rate)].set_index("contender")
        for i, name in enumerate(names):
            draw_time(axes, chosen.loc[name], i, LABELS[name][0])
        part = chosen.loc["overlap"]
        axes.set(
            title=f"{rate:g} Mbit/s, computed {computed}:\n{part.hidden:.0%} hidden "
            f"[{part.hidden_low:.0%}, {part.hidden_high:.0%}]",
            xlabel="milliseconds (log scale)",
            xscale="log",
            ylim=(len(names) - 0.5, -0.7),
        )
        axes.set_yticks(range(len(names)), [LABELS[name][1] for name in names])
        axes.margins(x=0.15)
    return drawing


def draw_time(axes: Axes, row: pd.Series, i: int, look: int) -> None:
    """The median of a step with its whiskers, and an upright line where the link alone would be."""
    colour, _, marker = LOOKS[look]
    whiskers = [[max(row.median_ms - row.low_ms, 0)], [max(row.high_ms - row.median_ms, 0)]]
    style = {"color": colour, "marker": marker, "markersize": 7, "capsize": 3}
    axes.errorbar(row.median_ms, i, xerr=whiskers, **style)
    axes.annotate(
        f"{row.median_ms:,.0f} ms",
        (row.median_ms, i),
        (0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    axes.plot([row.wire_ms or np.nan] * 2, [i - 0.25, i + 0.25], color="0.4", linewidth=1)


def note(rows: pd.DataFrame, facts: dict) -> str:
    """What the caption says besides."""
    config = facts["config"]
    how = {
        "namespaces": "in two network namespaces, the link between them limited by tc tbf",
        "delay": "on loopback, each collective being delayed as if by such a link "
        "(DistributedDataParallel cannot be, so it is left out)",
    }[rows["mode"].iloc[0]]
    return (
        f"{RANKS} gloo processes {how}. Forward, backward and step of {config['layers']} layers of "
        f"{config['width']} x {config['width']}, buckets of {config['bucket_cap_mb']:g} MB, one "
        f"thread a rank on a machine of {RANKS} cores. Computed here: linear layers, "
        f"{config['batch']} examples a rank, which leave no core for the exchange. Elsewhere: each "
        f"layer leaves the CPU idle for {config['layer_ms']:g} ms each way, as if a GPU computed "
        "it. Both ranks start a step together and the slower one counts. Upright line: how long "
        "the link takes for the bytes. Hidden: 1 - (overlap - no network) / (no overlap - no "
        "network), of the medians, in brackets its 95% interval by resampling the rounds."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The link's rates, the model, and how to do without a link."""
    add, count, number = parser.add_argument, positive(int), positive(float)
    rates = (1000.0, 200.0)
    add("--rates", type=number, nargs="+", default=rates, help="of the link, Mbit/s")
    add("--layers", type=count, default=16)
    add("--width", type=count, default=1024)
    add("--batch", type=count, default=32, help="examples a rank: how long backward takes")
    add(
        "--layer-ms",
        type=number,
        default=3.0,
        help="how long a layer takes that is computed elsewhere, each way",
    )
    add("--bucket-cap-mb", type=number, default=8.1, help="by default two layers")
    add(
        "--delay",
        action="store_true",
        help="an artificial delay instead of namespaces, which need root",
    )


RECORDED = (
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
MEASUREMENT = SpeedMeasurement(
    name="overlap",
    description=__doc__,
    add_options=add_options,
    quick={"layers": 4, "width": 256, "bucket_cap_mb": 0.25, "rates": (1000.0,), "rounds": 1},
    recorded=RECORDED,
    measure=measure,
    plot=plot,
    note=note,
)

if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        be_ranks(Path(sys.argv[2]))
    else:
        MEASUREMENT.main()
