"""run.json: what a run says of itself, besides its configuration."""

import json
import subprocess
from pathlib import Path

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
