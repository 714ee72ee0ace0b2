"""Print what a figure trains, before anything is trained.

    python -m onebit.lab.plan figure_04 --profile paper

The model is built on torch's meta device, so that a configuration that cannot work fails here, in
seconds.
"""

import argparse
import csv
import math
import shlex
from dataclasses import dataclass, replace

import torch

from onebit.lab.claims.statistics import volume_share
from onebit.lab.config import composed
from onebit.lab.report.artifact import Artifact, load_artifact, target
from onebit.lab.runs.load import SEEDS
from onebit.lab.runs.metadata import ROOT
from onebit.lab.training.run import Run, run_from

SLURM = ROOT / "scripts" / "slurm"


@dataclass(frozen=True)
class Machine:
    """What the estimate of the time assumes.

    workers: at most so many.
    flops: FLOP/s that a worker sustains.
    gbits: Gbit/s out of a worker; None if the network is no limit.
    """

    workers: int
    flops: float
    gbits: float | None


BY_NAME = "optimizer=NAME"
LOCAL = Machine(workers=4, flops=4e10, gbits=None)
# 64 V100 at a third of their peak, and the Ethernet's bandwidth as the paper measured it.
MACHINES = {
    "smoke": LOCAL,
    "laptop": LOCAL,
    "workstation": LOCAL,
    "paper": Machine(workers=64, flops=4e13, gbits=4.1),
}


@dataclass(frozen=True)
class Resources:
    """What an experiment takes of a cluster at the paper's scale: a row of resources.csv."""

    nodes: int
    workers_per_node: int
    time: str

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node


def resources(experiment: str) -> Resources:
    """The row of this experiment."""
    with open(SLURM / "resources.csv", newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["experiment"] == experiment)
    return Resources(int(row["nodes"]), int(row["workers_per_node"]), row["time"])


# ---- what a run is


def parameters(run: Run) -> tuple[int, int]:
    """The number of the model's parameters, and of those that are trained."""
    with torch.device("meta"):
        sizes = [(p.numel(), p.requires_grad) for p in run.task.model().parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def volumes(run: Run, size: int, workers: int) -> tuple[float, float]:
    """Bytes that a worker sends in the whole run: with exact averaging, and with 1 bit after T_w.

    An exact step sends 2 (W - 1) / W elements of 32 bits for each parameter.
    """
    a_step = 2 * (workers - 1) / workers * 4 * size
    steps = sum(phase.steps for phase in run.phases.values())
    warmup = sum(phase.warmup for phase in run.phases.values())
    return a_step * steps, a_step * steps * volume_share(warmup / steps)


def sources(options: dict) -> list[str]:
    """The data sets that these options name, each once: hub ids, or classes that make them."""
    inner = [
        name for value in options.values() if isinstance(value, dict) for name in sources(value)
    ]
    own = options.get("path", options.get("_target_", "").rpartition(".")[2])
    return list(dict.fromkeys(inner or [own] * bool(own)))


def data_of(task: dict) -> dict:
    """The options of a task that name its data: a text, all splits, or two of them."""
    return {name: task[name] for name in ("text", "data", "train", "test") if name in task}


# ---- how to launch it


def launch(experiment: str, profile: str, workers: int) -> list[str]:
    """The commands that start one run. At the paper's scale each of them does it by itself."""
    options = f"experiment={experiment} profile={profile} {BY_NAME} seed={SEEDS[0]}"
    if profile != "paper":
        return [f"python -m onebit.lab.train {options} comm=gloo workers={workers}"]
    asked = resources(experiment)
    nodes = -(-workers // asked.workers_per_node)
    per_node = workers // nodes
    train = f"-m onebit.lab.train {options}"
    return [
        sbatch(experiment, replace(asked, nodes=nodes, workers_per_node=per_node)),
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29500 {train} comm=nccl",
        f"mpirun -n {workers} python {train} comm=mpi",
    ]


def sbatch(experiment: str, asked: Resources) -> str:
    """The command that submits an experiment to Slurm, with a job for each seed."""
    return (
        f"sbatch --job-name={experiment} --nodes={asked.nodes} "
        f"--ntasks-per-node={asked.workers_per_node} --gpus-per-node={asked.workers_per_node} "
        f"--time={asked.time} scripts/slurm/train.sbatch {experiment} {BY_NAME}"
    )


# ---- the plan


def describe(name: str, profile: str, machine: Machine, workers: int | None = None) -> str:
    """The plan of a figure as text.

    Args:
        workers: by default the machine's, and at the paper's scale those of resources.csv.

    Raises:
        ValueError: there is no such figure, or its batch cannot be divided among the workers.
    """
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
    if workers is None:
        own = composed([f"experiment={experiment}", f"profile={profile}"]).workers
        workers = resources(experiment).workers if profile == "paper" else own or machine.workers
    arguments = [f"experiment={experiment}", f"profile={profile}", f"workers={workers}"]
    runs = [
        run_from(composed([*arguments, *artifact.overrides(optimizer)]))
        for optimizer in artifact.optimizers
    ]
    run, methods = runs[0], ", ".join(run.method for run in runs)
    size, trained = parameters(run)
    partly = "" if trained == size else f", {trained:,} of them trained"
    or_else = "one of" if profile == "paper" else f"or make reproduce-{target(artifact.name)}"
    return "\n".join(
        [
            f"{artifact.name}, profile {profile}: experiment {experiment}, {methods}",
            f"model       {size:,} parameters{partly} (built on the meta device)",
            f"data        {', '.join(sources(data_of(run.config['task'])))}",
            *phase_lines(run, workers),
            *cost_lines(run, trained, replace(machine, workers=workers)),
            f"launch      for each NAME of {methods}, "
            f"with seed {', '.join(map(str, SEEDS))}; {or_else}",
            *launch_lines(artifact, experiment, profile, workers),
        ]
    )


def launch_lines(artifact: Artifact, experiment: str, profile: str, workers: int) -> list[str]:
    """The commands, and the options of each optimizer if its name is no file of conf/optimizer."""
    overrides = {name: artifact.overrides(name) for name in artifact.optimizers}
    by_name = all(found == [f"optimizer={name}"] for name, found in overrides.items())
    commands = launch(experiment, profile, workers)
    if by_name:
        return [f"  {command}" for command in commands]
    return [
        *(f"  {command.replace(BY_NAME, 'OPTIONS')}" for command in commands),
        "where OPTIONS of each NAME are",
        *(f"  {name:23} {shlex.join(found)}" for name, found in overrides.items()),
    ]


def phase_lines(run: Run, workers: int) -> list[str]:
    """A line for each phase: its steps, T_w, batch, and how the workers share it."""
    lines = []
    for name, phase in run.phases.items():
        number, micro = run.micro_batches(phase, workers)
        tokens = f" of {phase.length} tokens" if phase.length > 1 else ""
        lines.append(
            f"{name:11} {phase.steps:,} steps, T_w = {phase.warmup:,}, "
            f"{phase.batch or run.batch:,} examples{tokens} a step: "
            f"{workers} workers x {number} x {micro}"
        )
    return lines


def cost_lines(run: Run, trained: int, machine: Machine) -> list[str]:
    """The samples, operations and bytes of a run, and the time that they take."""
    phases = run.phases.values()
    flop = sum(
        (phase.batch or run.batch) * phase.steps * run.task.flop(phase.length) for phase in phases
    )
    lines = [
        f"samples     {sum(phase.steps * (phase.batch or run.batch) for phase in phases):,}",
        f"compute     {flop:.2g} FLOP, {hours(flop / machine.workers / machine.flops)} "
        f"at {machine.flops:.2g} FLOP/s a worker (--flops)",
    ]
    exact, compressed = volumes(run, trained, machine.workers)
    for method, volume in (("exact", exact), ("1 bit after T_w", compressed)):
        took = ""
        if machine.gbits:
            seconds = 8 * volume / machine.gbits / 1e9
            took = f", {hours(seconds)} at {machine.gbits} Gbit/s (--gbits)"
        lines.append(f"volume      {method}: {size_text(volume)} sent by a worker{took}")
    return lines


def size_text(number: float) -> str:
    """A number of bytes with its unit."""
    power = int(math.log10(number)) // 3
    return f"{number / 1000**power:,.3g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def hours(seconds: float) -> str:
    """A time in hours, or in seconds if it is short."""
    return f"{seconds / 3600:,.1f} h" if seconds > 5400 else f"{seconds:,.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="What a figure trains, and how to launch it.")
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
