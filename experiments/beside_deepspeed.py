"""DeepSpeed 0.19.6's removed optimizers beside onebit's, in one engine, on the same data.

    python experiments/beside_deepspeed.py                       redraw from the committed CSV
    python experiments/beside_deepspeed.py --measure             train both, minutes on 2 cores
    python experiments/beside_deepspeed.py --measure --times     time both; leave the machine alone

DeepSpeed 0.19.6 is the last release with OneBitAdam, ZeroOneAdam and OneBitLamb. It is installed
into a folder of its own (scripts/install_deepspeed.py). Its three optimizers run on a CPU once its
"compressed" transport has a bit packer, which only Intel's GPUs had, and torch's old signatures
add_(number, tensor) and addcmul_(number, tensor, tensor) are there again. Gloo, too, wants the
scales as vectors of one element.

Curves: two gloo ranks in DeepSpeed's engine; an MLP predicts the next character of Python's
documentation from the last 16. The configuration of both is the same file: the old optimizer is
made by the engine, onebit's by from_config, engine_config and attach. onebit runs twice: without
the bound of its steps, which the old optimizers do not have, and with it, as it is by default.

Times: one step() of both optimizers in turn, in the same processes, on 1M and 16M elements in one
tensor, in the compressed phase; a time is that of the slower rank.

Rules, written before the committed runs; intervals are 95% t-intervals over the seeds, paired.
    1. the loss over the last tenth of the steps is at most 3% above the old optimizer's: the
       interval of the ratio ends below 1.03, for each of the three, with the bound of the steps
       and without it
    2. in the warm-up of 1-bit Adam and 1-bit LAMB both are the same algorithm, but for the first
       batch, which the old ones lose: the losses over its last half differ by less than 1%
    3. a compressed step takes less time than the old one's, at both sizes
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import ClassVar

import numpy as np
import pandas as pd

from onebit.lab.bench.measurement import Measurement, commit_and_date
from onebit.lab.claims.judge import table
from onebit.lab.claims.statistics import mean_interval
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements as measured

NAME = "beside_deepspeed"
TIMES = "beside_deepspeed_times"
VERSION = "0.19.6"
RANKS, BATCH, CONTEXT, LETTERS = 2, 32, 16, 32
STEPS, WARMUP, BLOCK = 400, 80, 20
SEEDS = (1, 2, 3, 4, 5)
SIZES = (2**20, 2**24)
TIMED = ("old", "onebit")
KINDS = {
    "OneBitAdam": ("1-bit Adam", {"lr": 2e-3, "freeze_step": WARMUP}),
    "ZeroOneAdam": (
        "0/1 Adam",
        {
            "lr": 2e-3,
            "var_freeze_step": WARMUP,
            "var_update_scaler": 8,
            "local_step_scaler": WARMUP,
            "local_step_clipper": 4,
        },
    ),
    "OneBitLamb": ("1-bit LAMB", {"lr": 1e-2, "freeze_step": WARMUP, "max_coeff": 0.3}),
}
SIDES = {
    "old": ("DeepSpeed 0.19.6", "#0072B2", "--"),
    "onebit": ("onebit, bound_steps=False", "#D55E00", "-"),
    "bounded": ("onebit, as it is by default", "#009E73", "-."),
}


def configuration(kind):
    """The file of both."""
    params = {"betas": [0.9, 0.98], "weight_decay": 0.01, "comm_backend_name": "compressed"}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # the old ones clip each rank by itself after the freeze
        "optimizer": {"type": kind, "params": params | KINDS[kind][1]},
    }


# ---- on a rank, where DeepSpeed 0.19.6 is importable


class Packer:
    """What the transport asks of its bit packer: 8 signs a byte, and back to +1 and -1."""

    def load(self):
        return self

    def packbits(self, x, numel, rank):
        import torch

        weights = 2 ** torch.arange(8, dtype=torch.uint8)
        return ((x.view(-1, 8) >= 0) * weights).sum(1).to(torch.uint8)

    def unpackbits(self, packed, numel, rank):
        import torch

        bits = packed.view(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten().float().mul_(2).sub_(1)


def mend():
    """Give DeepSpeed the packer and a gather that gloo takes, and torch its two old signatures."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo's own, not a C++ build
    deepspeed.ops.op_builder.PackbitsBuilder = Packer
    add, addcmul = torch.Tensor.add_, torch.Tensor.addcmul_

    def add_(self, first, *rest, **named):
        return add(self, *rest, alpha=first) if rest else add(self, first, **named)

    def addcmul_(self, first, *rest, **named):
        if len(rest) == 2:
            return addcmul(self, *rest, value=first)
        return addcmul(self, first, *rest, **named)

    torch.Tensor.add_, torch.Tensor.addcmul_ = add_, addcmul_
    all_gather = deepspeed.comm.all_gather

    def gather_at_least_1d(rows, tensor, **named):
        return all_gather(rows, torch.atleast_1d(tensor), **named)

    deepspeed.comm.all_gather = gather_at_least_1d  # gloo refuses a scale without dimension


def text():
    """Python's documentation as the numbers of its most frequent letters; 0 is any other."""
    import torch

    characters = "".join(topics.values()).lower()
    counts = pd.Series(list(characters)).value_counts()
    number = {letter: i + 1 for i, letter in enumerate(counts.index[: LETTERS - 1])}
    return torch.tensor([number.get(letter, 0) for letter in characters])


def make_model(seed):
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(LETTERS, 16),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * CONTEXT, 128),
        torch.nn.Tanh(),
        torch.nn.Linear(128, LETTERS),
    )


def make_engine(side, kind, seed):
    import deepspeed

    import onebit.deepspeed

    model, config = make_model(seed), configuration(kind)
    if side == "old":
        return deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]
    options = {"bound_steps": False} if side == "onebit" else {}
    optimizer = onebit.deepspeed.from_config(config, model.parameters(), **options)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=onebit.deepspeed.engine_config(config)
    )[0]
    return onebit.deepspeed.attach(engine)


def train(side, kind, seed, steps, letters):
    """A row for each block of steps: the mean loss over the block and the ranks."""
    import torch
    import torch.distributed as dist

    engine = make_engine(side, kind, seed)
    data = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, rows = [], []
    for step in range(1, steps + 1):
        starts = torch.randint(len(letters) - CONTEXT - 1, (BATCH,), generator=data)
        x = letters[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = torch.nn.functional.cross_entropy(engine(x[:, :-1]), x[:, -1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if step % BLOCK == 0:
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            losses.clear()
            value = float(mean) / dist.get_world_size()
            rows.append(
                {"side": side, "optimizer": kind, "seed": seed, "step": step, "loss": value}
            )
    return rows


def make_optimizers(kind, size):
    """Both optimizers, compressed, each with a tensor of `size` elements: side -> step."""
    import types

    import torch
    import torch.distributed as dist
    from deepspeed.runtime.fp16.onebit import adam, lamb, zoadam

    import onebit.deepspeed

    engine = types.SimpleNamespace(
        mpu=None, local_rank=dist.get_rank(), enable_backward_allreduce=True
    )
    classes = {
        "OneBitAdam": adam.OnebitAdam,
        "ZeroOneAdam": zoadam.ZeroOneAdam,
        "OneBitLamb": lamb.OnebitLamb,
    }
    block = configuration(kind)["optimizer"]
    short = {"freeze_step": 3, "var_freeze_step": 3, "local_step_clipper": 1}
    params = {k: short.get(k, v) for k, v in block["params"].items()}
    tensors = {side: torch.nn.Parameter(torch.ones(size)) for side in TIMED}
    optimizers = {
        "old": classes[kind]([tensors["old"]], deepspeed=engine, **params),
        "onebit": onebit.deepspeed.from_config(block | {"params": params}, [tensors["onebit"]]),
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    for p in tensors.values():
        p.grad = torch.randn(size, generator=generator)
    for optimizer in optimizers.values():
        for _ in range(6):
            optimizer.step()
    return {side: optimizer.step for side, optimizer in optimizers.items()}


def time_steps(sizes, rounds):
    """A row for each optimizer, size and side."""
    from onebit.lab.bench.timing import InStep, alternate

    rows = []
    for size in sizes:
        for kind in KINDS:
            timings = alternate(make_optimizers(kind, size), rounds, pace=InStep())
            for side in TIMED:
                rows.append(
                    {"side": side, "optimizer": kind, "n": size, **timings.summary(side, "old")}
                )
    return rows


def on_rank(job):
    """What a rank does; rank 0 prints the rows as one line of JSON."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job['rendezvous']}", rank=job["rank"], world_size=RANKS
    )
    mend()
    import deepspeed

    deepspeed.init_distributed("gloo")
    if job["times"]:
        rows = time_steps(job["sizes"], job["rounds"])
    else:
        letters = text()
        rows = [
            row
            for seed in job["seeds"]
            for kind in KINDS
            for side in SIDES
            for row in train(side, kind, seed, job["steps"], letters)
        ]
    if job["rank"] == 0:
        Path(job["rows"]).write_text(json.dumps(rows))


# ---- measuring


def deepspeed_folder():
    """Where DeepSpeed 0.19.6 is, after installing it if need be."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "install_deepspeed.py"
    done = subprocess.run(
        [sys.executable, script, VERSION], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def measure(**job):
    """The rows, from RANKS processes of this file."""
    paths = [deepspeed_folder(), *(path for path in sys.path[1:] if path)]
    with tempfile.TemporaryDirectory() as folder:
        job |= {"rendezvous": f"{folder}/rendezvous", "rows": f"{folder}/rows.json"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, json.dumps(job | {"rank": rank})],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
                | {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)}
                | {"WORLD_SIZE": str(RANKS)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(RANKS)
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError("a rank failed: its error is above")
        return json.loads(Path(job["rows"]).read_text())


# ---- what is found


def paired(rows, kind, steps, side="onebit"):
    """One side's mean loss over these steps over the old one's, for each seed."""
    chosen = rows[(rows.optimizer == kind) & rows.step.isin(steps)]
    means = chosen.groupby(["side", "seed"]).loss.mean()
    return (means[side] / means["old"]).to_numpy()


def judge(rows):
    """[what, measured, wanted, whether it holds] for each rule about losses."""
    last = rows.step.max()
    tail = [step for step in rows.step.unique() if step > 0.9 * last]
    warm = [step for step in rows.step.unique() if WARMUP / 2 < step <= WARMUP]
    lines = []
    for kind, side in product(KINDS, ("onebit", "bounded")):
        ratio = mean_interval(paired(rows, kind, tail, side))
        what = f"{KINDS[kind][0]}: final loss, {SIDES[side][0]} / DeepSpeed"
        lines.append([what, ratio.shown(".4f"), "below 1.03", yes_or_no(ratio.high < 1.03)])
    for kind in ("OneBitAdam", "OneBitLamb"):
        worst = np.abs(paired(rows, kind, warm) - 1).max()
        what = f"{KINDS[kind][0]}: largest difference in the warm-up"
        lines.append([what, f"{worst:.2%}", "below 1%", yes_or_no(worst < 0.01)])
    return lines


def yes_or_no(holds):
    return "yes" if holds else "no"


def judge_times(times):
    lines = []
    for row in times[times.side == "onebit"].itertuples():
        old = times[(times.side == "old") & (times.optimizer == row.optimizer) & (times.n == row.n)]
        lines.append(
            [
                f"{KINDS[row.optimizer][0]}, {row.n / 2**20:.0f}M elements: ms, old and onebit",
                f"{old.median_ms.item():.1f} and {row.median_ms:.1f}: {row.ratio:.3f} "
                f"[{row.ratio_low:.3f}, {row.ratio_high:.3f}]",
                "below 1",
                yes_or_no(row.ratio < 1),
            ]
        )
    return lines


def draw(rows):
    """Above: the losses. Below: each seed's loss over the old optimizer's, where they part."""
    drawing, axes = figures.canvas(2 * len(KINDS), len(KINDS))
    for i, (kind, (name, _)) in enumerate(KINDS.items()):
        losses = rows[rows.optimizer == kind].pivot(
            index="step", columns=["side", "seed"], values="loss"
        )
        for side, (label, colour, line) in SIDES.items():
            style = {"color": colour, "label": label, "linestyle": line}
            draw_band(axes[i], losses[side], style)
            draw_band(axes[len(KINDS) + i], losses[side] / losses["old"], style)
        axes[i].set(title=name, ylabel="training loss")
        axes[len(KINDS) + i].set(ylabel="loss / DeepSpeed's", xlabel="step")
        for panel in (axes[i], axes[len(KINDS) + i]):
            panel.axvline(WARMUP, color="grey", linewidth=0.8, linestyle=":")
    figures.legend(drawing)
    return drawing


def draw_band(panel, values, style):
    """A line for the mean over the seeds, a band from the smallest to the largest."""
    panel.plot(values.index, values.mean(axis=1), **style)
    low, high = values.min(axis=1), values.max(axis=1)
    panel.fill_between(values.index, low, high, color=style["color"], alpha=0.2, linewidth=0)


def note(rows, facts):
    return (
        f"DeepSpeed 0.19.6's optimizers and onebit's in the same engine, {RANKS} gloo ranks, "
        f"{rows.seed.nunique()} seeds (line: mean; band: smallest and largest), blocks of {BLOCK} "
        "steps. An MLP predicts the next character of Python's documentation; all read the same "
        f"configuration. Below: each seed's loss over the old optimizer's. The dotted line is the "
        f"freeze step, {WARMUP}."
    )


HEADER = ["quantity", "measured (95% interval)", "rule", "holds"]


def write_table(root):
    """All rules that have been measured, into figures/beside_deepspeed.md."""
    rows, record = measured.read(root, "deepspeed", NAME)
    lines, commits = judge(rows), [record["commit"][:10]]
    if (root / "speed" / f"{TIMES}.csv").exists():
        times, its_record = measured.read(root, "speed", TIMES)
        lines += judge_times(times)
        commits.append(its_record["commit"][:10])
    path = root / "figures" / f"{NAME}.md"
    path.write_text(
        f"{table(HEADER, lines)}\n\nCommits of the curves and the times: {', '.join(commits)}; "
        f"configuration of both sides: `{json.dumps(record['config'], sort_keys=True)}`.\n"
    )
    print(path)


@dataclass(frozen=True, kw_only=True)
class BesideDeepSpeed(Measurement):
    """The curves are its rows; with --times it measures results/speed/beside_deepspeed_times."""

    folder: ClassVar[str] = "deepspeed"

    def caption(self, rows, facts):
        return f"C{commit_and_date(facts)[1:]}"

    def main(self):
        options = self.parse()
        if options.measure and options.times:
            measure_times(options)
        else:
            super().main()
        write_table(options.results)


def add_options(parser):
    parser.add_argument("--times", action="store_true", help="time the steps instead of training")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=measured.positive(int), default=STEPS)
    parser.add_argument("--sizes", type=measured.positive(int), nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=measured.positive(int), default=15)


def measure_curves(options):
    return measure(times=False, seeds=options.seeds, steps=options.steps)


def measure_times(options):
    size = {"sizes": options.sizes, "rounds": options.rounds}
    rows = measure(times=True, **size)
    measured.write(options.results, "speed", TIMES, rows, CONSTANTS | size | {"seed": 1})


CONSTANTS = {"optimizers": {kind: configuration(kind) for kind in KINDS}, "ranks": RANKS}
MEASUREMENT = BesideDeepSpeed(
    name=NAME,
    description=__doc__,
    add_options=add_options,
    quick={"seeds": (1,), "steps": 2 * WARMUP, "sizes": (2**12,), "rounds": 3},
    recorded=("seeds", "steps"),
    constants=CONSTANTS,
    measure=measure_curves,
    plot=draw,
    note=note,
    rules=lambda rows: pd.DataFrame(judge(rows), columns=HEADER),
)

if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        on_rank(json.loads(sys.argv[1]))
    else:
        MEASUREMENT.main()
