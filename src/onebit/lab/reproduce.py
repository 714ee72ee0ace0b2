"""Run what figures lack, draw them, judge the claims.

    python -m onebit.lab.reproduce figure_04 figure_01 --profile laptop --live     one new seed, beside the committed ones
    python -m onebit.lab.reproduce figure_04 --profile laptop --seeds 1 2 3        of the runs that are committed

An interrupted command goes on where it stopped: a run that ended is kept, the one that was going on resumes from its
checkpoint. Neither is done with runs that were trained in another way than now; a live run must also be of this commit, and no
file may differ from it. A run that fails or diverges does not stop the others.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from omegaconf import OmegaConf

from onebit.lab.claims import CLAIMS, statistic_by_seed
from onebit.lab.claims.judge import consistent, judge
from onebit.lab.config import composed, plain
from onebit.lab.report.artifact import Artifact, load_artifact, overrides_of, target
from onebit.lab.runs.load import (
    PROFILES,
    RESULTS,
    SEEDS,
    TUNING_SEED,
    differing,
    load,
    require_alike,
    run_folder,
)
from onebit.lab.runs.metadata import ENDED, ROOT, commit, read_run
from onebit.lab.training.run import run_from

LIVE = RESULTS / "live"


def runs_of(artifacts: list[Artifact], profile: str) -> list[tuple[str, str]]:
    """The (experiment, optimizer) pairs that the figures train, each once."""
    return list(dict.fromkeys(pair for artifact in artifacts for pair in artifact.runs(profile)))


def new_seed(experiment: str, profile: str) -> int:
    """The first seed after the committed ones."""
    folders = (RESULTS / "runs" / experiment / profile).glob("*/seed-*")
    return (
        max((int(folder.name.removeprefix("seed-")) for folder in folders), default=TUNING_SEED) + 1
    )


def discard(runs: list[tuple[str, str]], options: argparse.Namespace, root: Path) -> None:
    """Remove the runs that are not to be gone on with: all with --fresh; of live ones those of another commit, configuration or seed.

    A live run says how the present commit behaves.
    """
    for experiment, optimizer in runs:
        for folder in (root / "runs" / experiment / options.profile / optimizer).glob("seed-*"):
            wanted = int(folder.name.removeprefix("seed-")) in options.seeds
            if (options.fresh and wanted) or (
                options.live
                and not (wanted and current(read_run(folder), experiment, optimizer, options))
            ):
                shutil.rmtree(folder)


def current(record: dict, experiment: str, optimizer: str, options: argparse.Namespace) -> bool:
    """Whether a live run is one of the present commit, without changes to it, and of the present options."""
    if commit().endswith("+dirty") or record.get("commit") != commit():
        return False
    return not differing(record, planned(experiment, optimizer, options, LIVE))


def arguments(
    experiment: str, optimizer: str, profile: str, seed: int, workers: int, folder: Path
) -> list[str]:
    """The options of one run."""
    return [
        f"experiment={experiment}",
        f"profile={profile}",
        *overrides_of(optimizer),
        "comm=gloo",
        f"workers={workers}",
        f"seed={seed}",
        f"output={os.path.relpath(folder, ROOT)}",
        "resume=true",
    ]


def planned(experiment: str, optimizer: str, options: argparse.Namespace, folder: Path) -> dict:
    """What run.json of a run to come will say of how it was trained; of the text see text_of."""
    return to_come(
        optimizer,
        options.workers,
        arguments(
            experiment, optimizer, options.profile, options.seeds[0], options.workers, folder
        ),
    )


def to_come(optimizer: str, workers: int, arguments: list[str]) -> dict:
    """The same of a run with these arguments."""
    return {"optimizer": optimizer, "workers": workers, "config": plain(composed(arguments))}


def text_of(config: dict) -> dict:
    """What run.json of a run with this configuration will say of its text, which is read now."""
    task = run_from(OmegaConf.create(config)).task
    task.prepare()
    return task.description()


def check(runs: list[tuple[str, str]], options: argparse.Namespace) -> None:
    """ValueError if the runs to come could not be compared, or gone on with, beside those under results/runs that stay."""
    for experiment in dict(runs):
        stay = []
        for folder in sorted((RESULTS / "runs" / experiment / options.profile).glob("*/seed-*")):
            record = read_run(folder)
            goes = (
                options.fresh
                and not options.live
                and (experiment, folder.parent.name) in runs
                and record.get("seed") in options.seeds
            )
            if record and not goes and record["seed"] != TUNING_SEED:
                stay.append({**record, "folder": os.path.relpath(folder, ROOT)})
        to_come = [
            planned(experiment, optimizer, options, RESULTS)
            for name, optimizer in runs
            if name == experiment
        ]
        if stay and not options.live:
            text = text_of(to_come[0]["config"])
            to_come = [record | text for record in to_come]
        require_alike(stay + to_come)


def train(
    experiment: str, optimizer: str, profile: str, seed: int, workers: int, folder: Path
) -> int:
    """Train one run, or the rest of it, in its own processes, progress bars and all; its exit status."""
    command = [
        sys.executable,
        "-m",
        "onebit.lab.train",
        *arguments(experiment, optimizer, profile, seed, workers, folder),
    ]
    print("$ python", *command[1:], flush=True)
    # Ctrl-C is for this process, which then ends the run without a traceback.
    return subprocess.run(
        command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    ).returncode


def train_missing(
    runs: list[tuple[str, str]], options: argparse.Namespace, root: Path
) -> list[str]:
    """Train the runs that are missing under `root`; the names of those that failed."""
    failed = []
    for seed in options.seeds:
        for experiment, optimizer in runs:
            folder, name = (
                run_folder(root, experiment, options.profile, optimizer, seed),
                f"{optimizer}, seed {seed} of {experiment}",
            )
            status = read_run(folder).get("status")
            if status in ENDED:
                print(f"{name}: {status} before, kept (FRESH=1 trains it anew)", flush=True)
            elif train(experiment, optimizer, options.profile, seed, options.workers, folder):
                failed.append(name)
    return failed


def text_table(header: list[str], lines: list[list[str]], widths: list[int]) -> str:
    """A table for the terminal; cells wrap at their column's width."""
    out = []
    for line in (header, *lines):
        cells = [
            textwrap.wrap(cell, width) or [""] for cell, width in zip(line, widths, strict=True)
        ]
        for i in range(max(map(len, cells))):
            parts = [
                (cell[i] if i < len(cell) else "").ljust(width)
                for cell, width in zip(cells, widths, strict=True)
            ]
            out.append("  ".join(parts).rstrip())
        out.append("-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(out)


def verdicts(experiments: set[str], profile: str, live: bool) -> str:
    """The claims that these runs speak to: the paper's number, the committed interval and verdict, and the live run's."""
    lines = []
    for claim in CLAIMS:
        if claim.experiment not in experiments or claim.profile != profile:
            continue
        committed = load(RESULTS, claim.experiment, profile)
        judgement = judge(claim, committed)
        ours = f"{claim.shown(judgement.interval)}, n = {judgement.interval.n}"
        line = [f"{claim.name} {claim.statement}", claim.paper(), ours, judgement.verdict]
        if live:
            rows = load(LIVE, claim.experiment, profile)
            value = statistic_by_seed(claim, rows)
            line += [
                f"{claim.shown(value.mean())}; {claim.detail(rows)}" if len(value) else "no run",
                consistent(claim, committed, rows),
            ]
        lines.append(line)
    if not lines:
        return f"No claim is judged at profile {profile}."
    header = ["claim", "the paper", "ours [95% interval]", "verdict"] + [
        "this run",
        "this run and ours",
    ] * live
    widths = [30, 20, 22, 14] + [22, 14] * live
    return text_table(header, lines, widths)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run what figures lack, draw them, judge the claims."
    )
    parser.add_argument(
        "figures", nargs="+", help="files of experiments/ without .py, e.g. figure_04"
    )
    parser.add_argument("--profile", default="laptop", choices=PROFILES)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help=f"default: {SEEDS}, smoke {SEEDS[:1]}, --live the first that is not committed",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="train into results/live and compare with the committed seeds",
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fresh", action="store_true", help="remove these runs first")
    options = parser.parse_args()
    try:
        options.figures = {name: load_artifact(name) for name in options.figures}
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    if TUNING_SEED in (options.seeds or ()):
        parser.exit(
            2,
            f"error: seed {TUNING_SEED} served to choose size and learning rate, so it is none of the results: choose others\n",
        )
    if min(options.seeds or SEEDS) < 0:
        parser.exit(2, f"error: seeds are whole numbers above 0, not {min(options.seeds)}\n")
    if options.profile == "paper":
        parser.error(
            f"the paper's profile runs on a cluster: make plan-{target(next(iter(options.figures)))} PROFILE=paper prints how to launch it"
        )
    return options


def main() -> None:
    try:
        reproduce(parse())
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command goes on from here.") from None


def reproduce(options: argparse.Namespace) -> None:
    start = time.monotonic()
    runs = runs_of(list(options.figures.values()), options.profile)
    root = LIVE if options.live else RESULTS
    default = (
        [new_seed(runs[0][0], options.profile)]
        if options.live
        else SEEDS[: 1 if options.profile == "smoke" else None]
    )
    options.seeds = options.seeds or list(default)
    try:
        check(runs, options)
    except ValueError as error:
        remedy = (
            "Bring back what the committed runs were trained with."
            if options.live
            else "FRESH=1 trains these figures and seeds anew."
        )
        raise SystemExit(f"error: {error} Nothing was trained. {remedy}") from None
    except RuntimeError as error:  # data or weights are missing
        raise SystemExit(f"error: {error}\nNothing was trained.") from None
    discard(runs, options, root)
    failed = train_missing(runs, options, root)
    for name, artifact in options.figures.items():
        try:
            print(artifact.save(options.profile, RESULTS, LIVE if options.live else None))
        except (FileNotFoundError, ValueError) as error:
            print(f"{name} is not drawn: {error}")
    print()
    print(verdicts({experiment for experiment, _ in runs}, options.profile, options.live))
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"Took {minutes} min {seconds} s.")
    if failed:
        raise SystemExit(
            f"Failed, see above: {'; '.join(failed)}. The same command tries them again."
        )


if __name__ == "__main__":
    main()
