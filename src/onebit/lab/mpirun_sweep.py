"""Train optimizers x seeds one after the other under mpirun: scripts/mpirun_sweep.

    scripts/mpirun_sweep figure_06 --profile paper --workers 8 --optimizers adam onebit_adam --seeds 1 2 3
    scripts/mpirun_sweep figure_06 --dry-run

The same command goes on where it stopped: a run that ended is kept, the one that was going on resumes from its checkpoint. A run that
fails or diverges does not stop the others. Exit code 1: at least one failed.
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
from onebit.lab.reproduce import text_table, to_come
from onebit.lab.runs.load import PROFILES, RESULTS, SEEDS, differing, run_folder
from onebit.lab.runs.metadata import ENDED, read_run


def command(options: argparse.Namespace, optimizer: str, seed: int, folder: Path) -> list[str]:
    """What starts one run."""
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
    """ValueError if a run is there already that was trained otherwise than this sweep would train it."""
    for optimizer in options.optimizers:
        arguments = [
            f"experiment={options.experiment}",
            f"profile={options.profile}",
            *overrides_of(optimizer),
            "comm=mpi",
            *options.options,
        ]
        asked = to_come(optimizer, options.workers, arguments)
        for seed in options.seeds:
            folder = run_folder(
                options.results, options.experiment, options.profile, optimizer, seed
            )
            record = read_run(folder)
            names = differing(record, asked) if record else []
            if names:
                raise ValueError(
                    f"{folder} holds a run with another {', '.join(names)}: name another folder by --results, or remove it"
                )


def sweep(options: argparse.Namespace) -> list[list[str]]:
    """Train what has not ended; optimizer, seed, outcome and minutes of each run."""
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
    """Its outcome: finished, diverged, or failed with its exit code."""
    code = subprocess.run(started).returncode
    status = read_run(folder).get("status")
    return status if code == 0 and status in ENDED else f"failed, exit code {code}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train optimizers x seeds one after the other under mpirun."
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
            f"error: no figure says which optimizers {options.experiment} compares: name them by --optimizers\n",
        )
    if not options.dry_run and shutil.which(options.mpirun[0]) is None:
        parser.exit(
            2,
            f"error: there is no {options.mpirun[0]}: install Open MPI (pip install .[mpi]), or name it by --mpirun\n",
        )
    return options


def main() -> None:
    os.environ["PATH"] += os.pathsep + str(
        Path(sys.executable).parent
    )  # an environment of its own may bring mpirun
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse()
    try:
        check(options)
        lines = sweep(options)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command goes on from here.") from None
    print("\n" + text_table(["optimizer", "seed", "outcome", "minutes"], lines, [32, 6, 24, 8]))
    raise SystemExit(any(outcome.startswith("failed") for _, _, outcome, _ in lines))


if __name__ == "__main__":
    main()
