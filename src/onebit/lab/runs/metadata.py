"""What run.json says of a run, and whether a folder's run may be gone on with."""

import json
import subprocess
from pathlib import Path

from omegaconf import DictConfig

from onebit.lab.config import plain

ROOT = Path(__file__).parents[4]
# Options that say where a machine keeps its files: at any depth, and not in run.json.
PLACES = ("cache", "data_root", "output")
# Options that a run may change when it is resumed.
INCIDENTAL = (
    *PLACES,
    "checkpoint_every",
    "comm",
    "device",
    "overwrite",
    "progress",
    "resume",
    "wandb",
    "workers",
)
ENDED = ("finished", "diverged")


def read_run(folder: Path) -> dict:
    """run.json of a run's folder; {} if there is none. ValueError if it is broken."""
    path = folder / "run.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is broken ({error}): bring the file back, or remove its folder and train the run again."
        ) from None


def without(options, names: tuple[str, ...]):
    """The options that do not have these names, at any depth."""
    if not isinstance(options, dict):
        return options
    return {name: without(value, names) for name, value in options.items() if name not in names}


def by_class_name(options):
    """The options with every `_target_` cut down to its class, at any depth.

    Runs are compared by what they computed, so a class that moves to another module still counts
    as the same one, and committed runs stay comparable.
    """
    if isinstance(options, dict):
        return {
            name: value.rpartition(".")[2] if name == "_target_" else by_class_name(value)
            for name, value in options.items()
        }
    return [by_class_name(value) for value in options] if isinstance(options, list) else options


def commit() -> str:
    """The commit that is checked out, "+dirty" if what computes the results differs from it; "unknown" outside git."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + (
            "+dirty" if _git("status", "--porcelain", "--", "src", "conf", "experiments") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def check_folder(config: DictConfig) -> str | None:
    """The status of the run in `config.output`, None if there is none.

    Raises ValueError if that run would be lost, or continued as another than it is.
    """
    if not config.output:
        raise ValueError("output is empty: name a folder, or leave it out.")
    for name in ("resume", "overwrite", "progress"):
        if not isinstance(config[name], bool):
            raise ValueError(f"{name} is true or false, not {config[name]}.")
    if config.resume and config.overwrite:
        raise ValueError(
            "resume=true goes on with a run and overwrite=true starts it anew: leave one of them out."
        )
    run = read_run(Path(config.output).expanduser())
    if not run or config.overwrite:
        return None
    if not config.resume:
        raise ValueError(
            f"{config.output} holds a run ({run['status']}): go on with it by resume=true, start anew by overwrite=true, "
            "or choose another folder by output=DIR."
        )
    own, saved = plain(config), run["config"]
    own, saved = (by_class_name(without(options, INCIDENTAL)) for options in (own, saved))
    differing = [key for key in own.keys() | saved.keys() if own.get(key) != saved.get(key)]
    if differing:
        raise ValueError(
            f"{config.output} holds a run with another {', '.join(sorted(differing))}: resume=true needs the same options; "
            "start anew by overwrite=true, or choose another folder by output=DIR."
        )
    return run["status"]
