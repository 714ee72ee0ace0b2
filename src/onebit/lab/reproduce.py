"""Run what figures lack, draw them, judge the claims.

    python -m onebit.lab.reproduce figure_04 figure_01 --profile laptop --live     one new seed, beside the committed ones
    python -m onebit.lab.reproduce figure_04 --profile laptop --seeds 0 1 2        the runs that are committed

An interrupted command goes on where it stopped: a run that ended is kept, the one that was going on resumes from its
checkpoint. A run that fails or diverges does not stop the others.
"""

import argparse
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from .claims import CLAIMS, statistic_by_seed
from .figures import load_figure, save
from .judge import consistent, judge, show
from .record import ROOT, commit, read_run
from .results import ENDED, RESULTS, load, run_folder

LIVE = RESULTS / "live"


def runs_of(modules: list) -> list[tuple[str, str]]:
    """The (experiment, optimizer) pairs that the figures read, each once."""
    return list(dict.fromkeys((module.EXPERIMENT, optimizer) for module in modules for optimizer in module.OPTIMIZERS))


def new_seed(experiment: str, profile: str) -> int:
    """The first seed after the committed ones."""
    folders = (RESULTS / "runs" / experiment / profile).glob("*/seed-*")
    return max((int(folder.name.removeprefix("seed-")) for folder in folders), default=-1) + 1


def discard(runs: list[tuple[str, str]], options: argparse.Namespace, root: Path) -> None:
    """Remove the runs that are not to be gone on with: all with --fresh; of live ones those of another commit or seed.

    A live run says how the present commit behaves.
    """
    for experiment, optimizer in runs:
        for folder in (root / "runs" / experiment / options.profile / optimizer).glob("seed-*"):
            wanted = int(folder.name.removeprefix("seed-")) in options.seeds
            stale = not wanted or read_run(folder).get("commit") != commit()
            if (options.fresh and wanted) or (options.live and stale):
                shutil.rmtree(folder)


def train(experiment: str, optimizer: str, profile: str, seed: int, workers: int, folder: Path) -> int:
    """Train one run, or the rest of it, in its own processes, progress bars and all; its exit status."""
    command = [sys.executable, "-m", "onebit.lab.train", f"experiment={experiment}", f"profile={profile}", f"optimizer={optimizer}",
               "comm=gloo", f"workers={workers}", f"seed={seed}", f"output={os.path.relpath(folder, ROOT)}", "resume=true"]
    print("$ python", *command[1:], flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


def train_missing(runs: list[tuple[str, str]], options: argparse.Namespace, root: Path) -> list[str]:
    """Train the runs that are missing under `root`; the names of those that failed."""
    failed = []
    for seed in options.seeds:
        for experiment, optimizer in runs:
            folder = run_folder(root, experiment, options.profile, optimizer, seed)
            status = read_run(folder).get("status")
            if status in ENDED:
                print(f"{optimizer}, seed {seed}: {status} before, kept (FRESH=1 trains it anew)", flush=True)
            elif train(experiment, optimizer, options.profile, seed, options.workers, folder):
                failed.append(f"{optimizer}, seed {seed}")
    return failed


def text_table(header: list[str], lines: list[list[str]], widths: list[int]) -> str:
    """A table for the terminal; cells wrap at their column's width."""
    out = []
    for line in (header, *lines):
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(line, widths, strict=True)]
        for i in range(max(map(len, cells))):
            parts = [(cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True)]
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
        ours = f"{show(judgement.interval, claim.style)}, n = {judgement.interval.n}"
        line = [f"{claim.name} {claim.statement}", claim.paper(), ours, judgement.verdict]
        if live:
            rows = load(LIVE, claim.experiment, profile)
            value = statistic_by_seed(claim, rows)
            line += [f"{value.mean():{claim.style}}; {claim.detail(rows)}" if len(value) else "no run", consistent(claim, committed, rows)]
        lines.append(line)
    if not lines:
        return f"No claim is judged at profile {profile}."
    header = ["claim", "the paper", "ours [95% interval]", "verdict"] + ["this run", "this run and ours"] * live
    widths = [30, 20, 22, 14] + [22, 14] * live
    return text_table(header, lines, widths)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run what figures lack, draw them, judge the claims.")
    parser.add_argument("figures", nargs="+", help="files of experiments/ without .py, e.g. figure_04")
    parser.add_argument("--profile", default="laptop", choices=("smoke", "laptop", "paper"))
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds to train; with --live the first that is not committed")
    parser.add_argument("--live", action="store_true", help="train into results/live and compare with the committed seeds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fresh", action="store_true", help="remove these runs first")
    options = parser.parse_args()
    if options.profile == "paper":
        number = int(options.figures[0].split("_")[-1])
        parser.error(f"the paper's profile runs on a cluster: make plan-figure-{number} PROFILE=paper prints how to launch it")
    return options


def main() -> None:
    start = time.monotonic()
    options = parse()
    modules = {name: load_figure(name) for name in options.figures}
    runs = runs_of(list(modules.values()))
    root = LIVE if options.live else RESULTS
    options.seeds = options.seeds or ([new_seed(runs[0][0], options.profile)] if options.live else [0, 1, 2])
    discard(runs, options, root)
    try:
        failed = train_missing(runs, options, root)
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command goes on from here.") from None
    for name, module in modules.items():
        try:
            print(save(module, name, options.profile, RESULTS, LIVE if options.live else None))
        except FileNotFoundError as error:
            print(f"{name} is not drawn: {error}")
    print()
    print(verdicts({experiment for experiment, _ in runs}, options.profile, options.live))
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"Took {minutes} min {seconds} s.")
    if failed:
        raise SystemExit(f"Failed, see above: {'; '.join(failed)}. The same command tries them again.")


if __name__ == "__main__":
    main()
