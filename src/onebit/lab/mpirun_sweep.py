"""Train all pairs of some optimizers and seeds under mpirun, one after the other.

    python -m onebit.lab.mpirun_sweep figure_06 --profile paper --workers 8 --seeds 1 2 3
    python -m onebit.lab.mpirun_sweep figure_06 --optimizers adam onebit_adam --dry-run

The same command continues after an interruption: runs that have ended are kept, and an unfinished
run resumes from its checkpoint. A run that fails or diverges does not stop the others. The exit
code is 1 if at least one failed.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from onebit.lab.config import wrong_override
from onebit.lab.report.artifact import load_artifact, overrides_of
from onebit.lab.report.terminal import text_table
from onebit.lab.runs.compare import differing
from onebit.lab.runs.load import PROFILES, RESULTS, SEEDS, run_folder
from onebit.lab.runs.metadata import ENDED, read_run
from onebit.lab.runs.planned import record_to_come


def command(options: argparse.Namespace, optimizer: str, seed: int, folder: Path) -> list[str]:
    """The command that starts one run."""
    arguments = [
        f"experiment={options.experiment}",
        f"profile={options.profile}",
        *overrides_of(optimizer),
        f"seed={seed}",
        "comm=mpi",
        f"output={folder}",
        "resume=true",
        *options.options,
    ]
    return [
        *options.mpirun,
        "-n",
        str(options.workers),
        sys.executable,
        "-m",
        "onebit.lab.train",
        *arguments,
    ]


def check(options: argparse.Namespace) -> None:
    """Raise ValueError if a run is there that was trained with other options than this sweep's."""
    for optimizer in options.optimizers:
        arguments = [
            f"experiment={options.experiment}",
            f"profile={options.profile}",
            *overrides_of(optimizer),
            "comm=mpi",
            *options.options,
        ]
        asked = record_to_come(optimizer, options.workers, arguments)
        for seed in options.seeds:
            folder = run_folder(
                options.results, options.experiment, options.profile, optimizer, seed
            )
            record = read_run(folder)
            names = differing(record, asked) if record else []
            if names:
                raise ValueError(
                    f"{folder} holds a run with another {', '.join(names)}: name another folder "
                    "with --results, or remove it."
                )


def sweep(options: argparse.Namespace) -> list[list[str]]:
    """Train what has not ended; returns optimizer, seed, outcome and minutes of each run."""
    lines = []
    for seed in options.seeds:
        for optimizer in options.optimizers:
            folder = run_folder(
                options.results, options.experiment, options.profile, optimizer, seed
            )
            status = read_run(folder).get("status")
            start = time.monotonic()
            if status in ENDED:
                outcome = f"{status} before, kept"
            else:
                started = command(options, optimizer, seed, folder)
                print("$", shlex.join(started), flush=True)
                outcome = "dry run" if options.dry_run else run(started, folder)
            lines.append([optimizer, str(seed), outcome, f"{(time.monotonic() - start) / 60:.1f}"])
    return lines


def run(started: list[str], folder: Path) -> str:
    """Run the command; returns finished, diverged, or failed with its exit code."""
    code = subprocess.run(started).returncode
    status = read_run(folder).get("status")
    return status if code == 0 and status in ENDED else f"failed, exit code {code}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train all pairs of some optimizers and seeds under mpirun, one by one."
    )
    parser.add_argument("experiment", help="a file of conf/experiment, e.g. figure_06")
    parser.add_argument("--profile", default="laptop", choices=PROFILES)
    parser.add_argument("--workers", type=int, default=4, help="processes that mpirun starts")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        help="files of conf/optimizer or variants of a sweep; default: those of this figure",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further options of onebit.lab.train, e.g. wandb=offline",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that holds runs/")
    parser.add_argument(
        "--mpirun",
        type=shlex.split,
        default=["mpirun"],
        help="the launcher with its own options; default: mpirun",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands and start nothing"
    )
    return parser


def parse() -> argparse.Namespace:
    """The options. The process ends with code 2 if a name is wrong or there is no launcher."""
    parser = make_parser()
    options = parser.parse_args()
    for optimizer in options.optimizers or ("adam",):
        base = overrides_of(optimizer)[:1]  # the further options of a variant are ours
        wrong = wrong_override([f"experiment={options.experiment}", *base, *options.options])
        if wrong:
            parser.exit(2, f"error: {wrong}\n")
    try:
        options.optimizers = options.optimizers or load_artifact(options.experiment).optimizers
    except ValueError:
        parser.exit(
            2,
            f"error: no figure says which optimizers {options.experiment} compares: name them with "
            "--optimizers\n",
        )
    if not options.dry_run and shutil.which(options.mpirun[0]) is None:
        parser.exit(
            2,
            f"error: there is no {options.mpirun[0]}: install Open MPI (pip install onebit[mpi]), "
            "or name the launcher with --mpirun\n",
        )
    return options


def main() -> None:
    # A virtual environment may have an mpirun of its own.
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse()
    try:
        check(options)
        lines = sweep(options)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command continues from here.") from None
    print("\n" + text_table(["optimizer", "seed", "outcome", "minutes"], lines, [32, 6, 24, 8]))
    raise SystemExit(any(outcome.startswith("failed") for _, _, outcome, _ in lines))


if __name__ == "__main__":
    main()
