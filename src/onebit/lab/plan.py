"""What a figure would train, before anything is trained: `python -m onebit.lab.plan figure_04 --profile paper`.

The model is built on torch's meta device, so that a configuration that cannot work fails here, in seconds.
"""

import argparse
import math
import shlex
from dataclasses import dataclass, replace

import torch

from onebit.lab.claims.statistics import volume_share
from onebit.lab.config import composed
from onebit.lab.report.artifact import Artifact, load_artifact, target
from onebit.lab.runs.load import SEEDS
from onebit.lab.training.run import Run, run_from


@dataclass(frozen=True)
class Machine:
    """What the estimate assumes: workers, sustained FLOP/s of a worker, Gbit/s out of a worker (None: not a limit)."""

    workers: int
    flops: float
    gbits: float | None


LOCAL = Machine(workers=4, flops=4e10, gbits=None)
# 64 V100 at a third of their peak; the Ethernet measured by the paper
MACHINES = {"smoke": LOCAL, "laptop": LOCAL, "paper": Machine(workers=64, flops=4e13, gbits=4.1)}


def parameters(run: Run) -> tuple[int, int]:
    """The size of the model, and how much of it is trained."""
    with torch.device("meta"):
        sizes = [
            (parameter.numel(), parameter.requires_grad)
            for parameter in run.task.model().parameters()
        ]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def volumes(run: Run, size: int, workers: int) -> tuple[float, float]:
    """Bytes that a worker sends in the whole run, (exact, 1 bit after T_w): 32 bits and 1 bit an element, 2 (W - 1) / W elements a step."""
    a_step = 2 * (workers - 1) / workers * 4 * size
    steps = sum(phase.steps for phase in run.phases.values())
    warmup = sum(phase.warmup for phase in run.phases.values())
    return a_step * steps, a_step * steps * volume_share(warmup / steps)


def sources(options: dict) -> list[str]:
    """The data sets that are named in the options: their ids on the hub, or the classes that make them, each once."""
    inner = [
        name for value in options.values() if isinstance(value, dict) for name in sources(value)
    ]
    own = options.get("path", options.get("_target_", "").rpartition(".")[2])
    return list(dict.fromkeys(inner or [own] * bool(own)))


def data_of(task: dict) -> dict:
    """The parts of a task's options that read data: a text, all splits, or the train and test split."""
    return {name: task[name] for name in ("text", "data", "train", "test") if name in task}


def launch(arguments: str, machine: Machine, profile: str) -> list[str]:
    """How to start one run."""
    if profile != "paper":
        return [f"python -m onebit.lab.train {arguments} comm=gloo workers={machine.workers}"]
    nodes = -(-machine.workers // 8)
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return [
        f"torchrun --nnodes {nodes} --nproc-per-node {machine.workers // nodes} {rendezvous} -m onebit.lab.train {arguments} comm=nccl",
        f"mpirun -n {machine.workers} python -m onebit.lab.train {arguments} comm=mpi",
    ]


def describe(name: str, profile: str, machine: Machine, workers: int | None = None) -> str:
    """The plan as text. workers: by default the machine's, but in the paper's profile no more than the batch has micro-batches."""
    artifact = load_artifact(name)
    parts = (
        describe_experiment(artifact, experiment, profile, machine, workers)
        for experiment in artifact.experiments_at(profile)
    )
    more = artifact.plan_notes
    return "\n\n".join(parts) + (f"\n{more[profile]}" if profile in more else "")


def describe_experiment(
    artifact: Artifact, experiment: str, profile: str, machine: Machine, workers: int | None
) -> str:
    """The plan of one of the experiments that a figure, sweep or table trains."""
    arguments = [f"experiment={experiment}", f"profile={profile}"]
    if workers is None:
        config = composed(arguments)
        workers = (
            min(machine.workers, config.batch // config.micro_batch)
            if profile == "paper"
            else machine.workers
        )
    machine = replace(machine, workers=workers)
    runs = [
        run_from(
            composed([*arguments, *artifact.overrides(optimizer), f"workers={machine.workers}"])
        )
        for optimizer in artifact.optimizers
    ]
    run = runs[0]
    size, trained = parameters(run)
    samples = run.batch * sum(phase.steps for phase in run.phases.values())
    flop = run.batch * sum(
        phase.steps * run.task.flop(phase.length) for phase in run.phases.values()
    )
    lines = [
        f"{artifact.name}, profile {profile}: experiment {experiment}, {', '.join(run.method for run in runs)}",
        f"model       {size:,} parameters{'' if trained == size else f', {trained:,} of them trained'} (built on the meta device)",
        f"data        {', '.join(sources(data_of(run.config['task'])))}",
    ]
    for phase_name, phase in run.phases.items():
        number, micro = run.micro_batches(phase, machine.workers)
        tokens = f" of {phase.length} tokens" if phase.length > 1 else ""
        lines.append(
            f"{phase_name:11} {phase.steps:,} steps, T_w = {phase.warmup:,}, {run.batch:,} examples{tokens} a step: "
            f"{machine.workers} workers x {number} x {micro}"
        )
    lines += [
        f"samples     {samples:,}",
        f"compute     {flop:.2g} FLOP, {hours(flop / machine.workers / machine.flops)} "
        f"at {machine.flops:.2g} FLOP/s a worker (--flops)",
    ]
    for method, volume in zip(
        ("exact", "1 bit after T_w"), volumes(run, trained, machine.workers), strict=True
    ):
        exchange = (
            f", {hours(8 * volume / machine.gbits / 1e9)} at {machine.gbits} Gbit/s (--gbits)"
            if machine.gbits
            else ""
        )
        lines.append(f"volume      {method}: {size_text(volume)} sent by a worker{exchange}")
    lines.append(
        f"launch      for each NAME of {', '.join(run.method for run in runs)}, with seed {', '.join(map(str, SEEDS))}; "
        f"{'one of' if profile == 'paper' else 'or make reproduce-' + target(artifact.name)}"
    )
    overrides = {name: artifact.overrides(name) for name in artifact.optimizers}
    by_name = all(found == [f"optimizer={name}"] for name, found in overrides.items())
    chosen = "optimizer=NAME" if by_name else "OPTIONS"
    options = " ".join([*arguments, chosen, f"seed={SEEDS[0]}"])
    lines += ["  " + command for command in launch(options, machine, profile)]
    if not by_name:
        lines.append("where OPTIONS of each NAME are")
        lines += [f"  {name:23} {shlex.join(found)}" for name, found in overrides.items()]
    return "\n".join(lines)


def size_text(number: float) -> str:
    power = int(math.log10(number)) // 3
    return f"{number / 1000**power:,.3g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds > 5400 else f"{seconds:,.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="What a figure would train, and how to launch it.")
    parser.add_argument("figure", help="a file of experiments/ without .py, e.g. figure_04")
    parser.add_argument("--profile", default="laptop", choices=tuple(MACHINES))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--flops", type=float, help="FLOP/s that a worker sustains")
    parser.add_argument("--gbits", type=float, help="Gbit/s out of a worker")
    options = parser.parse_args()
    default = MACHINES[options.profile]
    machine = replace(
        default, flops=options.flops or default.flops, gbits=options.gbits or default.gbits
    )
    try:
        print(describe(options.figure, options.profile, machine, options.workers))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
