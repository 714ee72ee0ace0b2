"""A sweep over clusters and rates: its cases, and what the ranks of one measure.

The ranks run `python -m onebit.lab.bench.network.sweep CASE FILE`.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from onebit.comm import Communicator, Mpi
from onebit.lab.bench.network import contenders
from onebit.lab.bench.network.checks import require_carried, require_possible
from onebit.lab.bench.network.hosts import cluster
from onebit.lab.bench.timing import InStep, Timings, alternate
from onebit.lab.training.workers import MpiWorld, Processes

MODULE = "onebit.lab.bench.network.sweep"
UNLIMITED = 0.0  # Mbit/s, in the CSV: as fast as the machine can
SLACK = 0.5  # of the promised bytes: what must at least be seen, since rows hold whole rounds only


@dataclass(frozen=True)
class Case:
    """One setting of the sweep.

    Attributes:
        part: "exchange", the exchange of a vector alone, or "training", steps of a model.
        backend: gloo or mpi.
        hosts, per_host: of the cluster.
        rate_mbit: of a host's link, or UNLIMITED.
    """

    part: str
    backend: str
    hosts: int
    per_host: int
    rate_mbit: float


@dataclass(frozen=True)
class Sizes:
    """What is exchanged and trained, and how often.

    Attributes:
        elements: of the vector.
        model: (vocabulary, width, layers, samples of a rank, tokens of a sample).
        rounds: that count, in each case.
    """

    elements: int
    model: tuple[int, ...]
    rounds: int


class InMpi:
    """All ranks of an Mpi communicator measure together, as `timing.InStep` for torch's."""

    def __init__(self, communicator: Mpi):
        self.communicator = communicator

    def start(self) -> None:
        """Called before each sample."""
        self.communicator.comm.Barrier()

    def sum(self, values: list[float]) -> list[float]:
        """Over the ranks."""
        return self._gathered(values).sum(axis=0).tolist()

    def max(self, values: list[float]) -> list[float]:
        """Over the ranks."""
        return self._gathered(values).max(axis=0).tolist()

    def _gathered(self, values: list[float]) -> np.ndarray:
        own = torch.tensor(values, dtype=torch.float64).view(torch.uint8)
        return self.communicator.all_gather(own).view(torch.float64).numpy()


# ---- on a rank


def main() -> None:
    """What every rank of the cluster runs; rank 0 writes the rows."""
    (case, sizes), path = from_text(sys.argv[1]), Path(sys.argv[2])
    work = partial(measure_as_rank, case=case, sizes=sizes, path=path)
    if case.backend == "mpi":
        MpiWorld(workers=None, cuda_aware=False).run(work)
    else:
        Processes(workers=None, backend="gloo", start="fork").run(work)


def measure_as_rank(
    communicator: Communicator, turn: object, case: Case, sizes: Sizes, path: Path
) -> None:
    """Time the contenders of the case in turn."""
    pace = InMpi(communicator) if case.backend == "mpi" else InStep()
    if case.part == "exchange":
        made = contenders.exchanges(communicator, sizes.elements)
        nbytes = {name: exchanged(name, case, sizes.elements) for name in made}
        steps = 1
    else:
        made = contenders.trainings(communicator, sizes.model)
        parameters = made["ddp_adam"].parameters
        nbytes = {name: exchanged(name, case, parameters) for name in made}
        steps = contenders.PERIOD
    timings = alternate(made, sizes.rounds, warmup=1, pace=pace)
    if communicator.rank == 0:
        path.write_text(json.dumps(rows_of(case, timings, nbytes, steps)))


def rows_of(case: Case, timings: Timings, nbytes: dict[str, float], steps: int) -> list[dict]:
    """A row for each contender; times are those of one step."""
    rival = contenders.RIVALS[case.part]
    seconds = {name: values / steps for name, values in timings.seconds.items()}
    scaled = Timings(seconds, timings.dropped, timings.disturbed)
    return [
        {
            **asdict(case),
            "contender": name,
            "bytes_leaving_host": nbytes[name],
            **scaled.summary(name, rival),
        }
        for name in seconds
    ]


def exchanged(name: str, case: Case, elements: int) -> float:
    """Bytes that must leave a host in a step at least, whatever the algorithm, headers not counted.

    An all_reduce among H hosts of B bytes needs 2 (H - 1) / H B; in a compressed exchange every
    rank sends its rows to the ranks elsewhere, and what a host's ranks have averaged leaves once.
    """
    hosts, per_host = case.hosts, case.per_host
    ranks = hosts * per_host
    bits = elements // 8 / ranks  # of one message; scales and padding not counted
    compressed = per_host * (ranks - per_host) * bits + per_host * bits
    ring = 2 * (hosts - 1) / hosts
    return {
        "all_reduce": 4 * elements * ring,
        "all_reduce_fp16": 2 * elements * ring,
        "compressed": compressed,
        "ddp_adam": 4 * elements * ring,
        "ddp_fp16": 2 * elements * ring,
        "ddp_powersgd": 0.0,  # it depends on the tensors' shapes
        "local_adam": 4 * elements * ring / contenders.PERIOD,
        "onebit_adam": compressed,
        "onebit_lamb": compressed,
        "zero_one_adam": compressed / contenders.PERIOD,
    }[name]


# ---- on the machine that has the cluster


def measure_case(case: Case, sizes: Sizes) -> list[dict]:
    """Make the cluster, measure, and refuse what the wire cannot have carried."""
    rate = case.rate_mbit or None
    with (
        tempfile.TemporaryDirectory(prefix="onebit-") as folder,
        cluster(case.hosts, rate, case.per_host) as made,
    ):
        path = Path(folder, "rows.json")
        before = made.sent()
        command = [sys.executable, "-m", MODULE, as_text(case, sizes), str(path)]
        run = made.run_mpi if case.backend == "mpi" else made.run
        run(command)
        rows = json.loads(path.read_text())
        steps = contenders.PERIOD if case.part == "training" else 1
        promised = sum(row["bytes_leaving_host"] * row["rounds"] for row in rows) * steps
        sent = require_carried(made, before, SLACK * promised)
    for row in rows:
        what = f"{row['contender']} ({case})"
        nbytes = steps * row["bytes_leaving_host"]
        require_possible(what, steps * row["median_ms"] / 1e3, nbytes, rate)
        row["wire_ms"] = 8e-3 * row["bytes_leaving_host"] / rate if rate else 0.0
        row["interface_mb"] = max(sent) / 1e6
    return rows


def as_text(case: Case, sizes: Sizes) -> str:
    """For the command line of a rank."""
    return json.dumps([asdict(case), asdict(sizes)])


def from_text(text: str) -> tuple[Case, Sizes]:
    """What `as_text` wrote."""
    case, sizes = json.loads(text)
    return Case(**case), Sizes(**{**sizes, "model": tuple(sizes["model"])})


def is_measured(case: Case, rows: list[dict]) -> bool:
    """Whether its rows are there already."""
    return any(all(row[name] == value for name, value in asdict(case).items()) for row in rows)


if __name__ == "__main__":
    main()
