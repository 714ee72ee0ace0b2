"""run.json: what a run says of itself, besides its configuration."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[4]
ENDED = ("finished", "diverged")  # the statuses of a run that has ended in order


def read_run(folder: Path) -> dict:
    """run.json of a run's folder; {} if there is none.

    Raises:
        ValueError: the file is broken.
    """
    path = folder / "run.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is broken ({error}): restore the file, or remove its folder and train the "
            "run again."
        ) from None


def commit() -> str:
    """The commit that is checked out, or "unknown" outside git.

    "+dirty" follows if src, conf or experiments, which compute the results, differ from it.
    """
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", "src", "conf", "experiments")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+dirty" if changes else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict:
    """The machine and the versions that decide a run's speed and its last bits."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu_family": _first("/proc/cpuinfo", "cpu family"),
        "cpu_model": _first("/proc/cpuinfo", "model"),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": _version("numba"),
    }


def _first(path: str, name: str) -> str | None:
    """The value of the first line 'name : value' of a file in /proc; None if there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name),
        None,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
