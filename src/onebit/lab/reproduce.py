"""Train the runs that figures lack, draw the figures, and judge the claims.

    python -m onebit.lab.reproduce figure_04 --profile laptop --seeds 1 2 3
    python -m onebit.lab.reproduce figure_04 figure_01 --profile laptop --live

The first command completes the runs that are committed. The second trains one new seed and compares
it with the committed ones.

The same command continues after an interruption: runs that have ended are kept, and an unfinished
run resumes from its checkpoint, unless it was trained with other options than now. A live run is
also trained again if it is of another commit, or if files differ from the commit. A run that fails
or diverges does not stop the others.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from onebit.lab.report.artifact import Artifact, load_artifact, target
from onebit.lab.report.terminal import verdicts
from onebit.lab.runs.compare import differing
from onebit.lab.runs.load import PROFILES, RESULTS, SEEDS, TUNING_SEED, run_folder
from onebit.lab.runs.metadata import ENDED, ROOT, commit, read_run
from onebit.lab.runs.planned import (
    arguments,
    new_seed,
    record_to_come,
    records_under,
    require_comparable,
    workers_of,
)

LIVE = RESULTS / "live"
WORKSTATION = (1, 2, 3, 4, 5, 6)  # seeds; onebit.lab.claims says how large a difference they show


def runs_of(artifacts: list[Artifact], profile: str) -> list[tuple[str, str]]:
    """The (experiment, optimizer) pairs that these figures train, each once."""
    return list(dict.fromkeys(pair for artifact in artifacts for pair in artifact.runs(profile)))


# ---- before anything is trained


def planned(experiment: str, optimizer: str, options: argparse.Namespace, folder: Path) -> dict:
    """What run.json of a run with these options will say of how it was trained."""
    seed = options.seeds[0]
    workers = options.workers or workers_of(experiment, options.profile)
    return record_to_come(
        optimizer,
        workers,
        arguments(experiment, optimizer, options.profile, seed, workers, folder),
    )


def check(runs: list[tuple[str, str]], options: argparse.Namespace) -> None:
    """Raise ValueError if the planned runs are not comparable with the committed ones that stay."""
    for experiment in dict(runs):
        kept = [
            record
            for record in records_under(RESULTS, experiment, options.profile)
            if not replaced(record, experiment, runs, options)
        ]
        to_come = [
            planned(experiment, optimizer, options, RESULTS)
            for name, optimizer in runs
            if name == experiment
        ]
        require_comparable(to_come, kept, read_data=not options.live)


def replaced(record: dict, experiment: str, runs: list, options: argparse.Namespace) -> bool:
    """Whether --fresh will remove this committed run and train it again."""
    named = (experiment, record["optimizer"]) in runs and record["seed"] in options.seeds
    return options.fresh and not options.live and named


def discard(runs: list[tuple[str, str]], options: argparse.Namespace, root: Path) -> None:
    """Remove the runs under `root` that are to be trained from the beginning.

    With --fresh these are all that were asked for. Of the live runs these are also those of
    another seed, commit or configuration, since live runs show what the present commit does.
    """
    for experiment, optimizer in runs:
        for folder in (root / "runs" / experiment / options.profile / optimizer).glob("seed-*"):
            wanted = int(folder.name.removeprefix("seed-")) in options.seeds
            stale = options.live and not (
                wanted and current(read_run(folder), experiment, optimizer, options)
            )
            if stale or (options.fresh and wanted):
                shutil.rmtree(folder)


def current(record: dict, experiment: str, optimizer: str, options: argparse.Namespace) -> bool:
    """Whether a live run is of the present commit, without changes to it, and of these options."""
    if commit().endswith("+dirty") or record.get("commit") != commit():
        return False
    return not differing(record, planned(experiment, optimizer, options, LIVE))


# ---- training


def train(
    experiment: str, optimizer: str, profile: str, seed: int, workers: int, folder: Path
) -> int:
    """Train one run, or the rest of it, in processes of its own; returns the exit status."""
    command = [
        sys.executable,
        "-m",
        "onebit.lab.train",
        *arguments(experiment, optimizer, profile, seed, workers, folder),
    ]
    print("$ python", *command[1:], flush=True)
    # Only this process reacts to Ctrl-C, and then ends the run without a traceback.
    return subprocess.run(
        command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    ).returncode


def train_missing(
    runs: list[tuple[str, str]], options: argparse.Namespace, root: Path
) -> list[str]:
    """Train the runs that are missing under `root`; returns the names of those that failed."""
    failed = []
    workers = {name: options.workers or workers_of(name, options.profile) for name, _ in runs}
    for seed in options.seeds:
        for experiment, optimizer in runs:
            folder = run_folder(root, experiment, options.profile, optimizer, seed)
            name = f"{optimizer}, seed {seed} of {experiment}"
            status = read_run(folder).get("status")
            if status in ENDED:
                print(f"{name}: {status} before, kept (FRESH=1 trains it again)", flush=True)
            elif train(experiment, optimizer, options.profile, seed, workers[experiment], folder):
                failed.append(name)
    return failed


# ---- the command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the runs that figures lack, draw the figures, and judge the claims."
    )
    parser.add_argument(
        "figures", nargs="+", help="files of experiments/ without .py, e.g. figure_04"
    )
    parser.add_argument("--profile", default="laptop", choices=PROFILES)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help=f"default: {SEEDS}, for smoke {SEEDS[:1]}, for workstation {WORKSTATION}, with --live "
        "the first new seed",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="train into results/live and compare with the committed seeds",
    )
    parser.add_argument("--workers", type=int, help="default: the experiment's, mostly 4")
    parser.add_argument("--fresh", action="store_true", help="remove these runs first")
    options = parser.parse_args()
    try:
        options.figures = {name: load_artifact(name) for name in options.figures}
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    error = wrong_choice(options)
    if error:
        parser.exit(2, f"error: {error}\n")
    return options


def wrong_choice(options: argparse.Namespace) -> str | None:
    """What is wrong with the seeds or the profile; None if nothing is."""
    if TUNING_SEED in (options.seeds or ()):
        return (
            f"seed {TUNING_SEED} served to choose the model's size and the learning rate, so that "
            "it is not among the results: choose other seeds"
        )
    if min(options.seeds or SEEDS) < 0:
        return f"seeds are whole numbers above 0, not {min(options.seeds)}"
    if options.profile == "paper":
        figure = target(next(iter(options.figures)))
        return (
            f"the paper's profile runs on a cluster: make plan-{figure} PROFILE=paper prints the "
            "commands that launch it"
        )
    return None


def default_seeds(experiment: str, options: argparse.Namespace) -> list[int]:
    """The seeds that are trained if none are named."""
    if options.live:
        return [new_seed(RESULTS, experiment, options.profile)]
    return list({"smoke": SEEDS[:1], "workstation": WORKSTATION}.get(options.profile, SEEDS))


def reproduce(options: argparse.Namespace) -> None:
    """Check, train, draw and judge, as the options say."""
    start = time.monotonic()
    runs = runs_of(list(options.figures.values()), options.profile)
    root = LIVE if options.live else RESULTS
    options.seeds = options.seeds or (default_seeds(runs[0][0], options) if runs else [])
    try:
        check(runs, options)
    except ValueError as error:
        remedy = (
            "Restore the options that the committed runs were trained with."
            if options.live
            else "FRESH=1 trains these figures and seeds again."
        )
        raise SystemExit(f"error: {error} Nothing was trained. {remedy}") from None
    except RuntimeError as error:  # data or weights are missing
        raise SystemExit(f"error: {error}\nNothing was trained.") from None
    discard(runs, options, root)
    failed = train_missing(runs, options, root)
    live = LIVE if options.live else None
    for name, artifact in options.figures.items():
        try:
            artifact.measure(options.profile)
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
        try:
            print(artifact.save(options.profile, RESULTS, live))
        except (FileNotFoundError, ValueError) as error:
            print(f"{name} is not drawn: {error}")
    print()
    print(verdicts({experiment for experiment, _ in runs}, options.profile, RESULTS, live))
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"Took {minutes} min {seconds} s.")
    if failed:
        raise SystemExit(
            f"Failed, see above: {'; '.join(failed)}. The same command tries them again."
        )


def main() -> None:
    try:
        reproduce(parse())
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command continues from here.") from None


if __name__ == "__main__":
    main()
