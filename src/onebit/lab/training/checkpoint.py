"""Checkpoints of a run: a folder for each step, with a file for each rank.

checkpoints/step-00000400/rank-0.pt ...
checkpoints/latest                          names the newest complete folder
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from onebit.comm import Communicator

KEPT = 2  # the number of checkpoints that stay


class Checkpoints:
    """The checkpoints of a run, of which the newest KEPT stay."""

    def __init__(self, folder: Path, communicator: Communicator):
        self.folder = folder
        self.communicator = communicator

    def save(self, step: int, state: dict) -> None:
        """Save this rank's state. All ranks must call it.

        `latest` names the new folder when all ranks have written their files.
        """
        target = self.folder / f"step-{step:08d}"
        target.mkdir(parents=True, exist_ok=True)
        _write(target / f"rank-{self.communicator.rank}.pt", lambda path: torch.save(state, path))
        self._wait_for_all()
        if self.communicator.rank == 0:
            _write(self.folder / "latest", lambda path: path.write_text(target.name))
            for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
                shutil.rmtree(old)

    def load(self) -> dict | None:
        """This rank's state in the newest complete checkpoint; None if there is none.

        Raises:
            RuntimeError: another number of workers has written it.
        """
        source = newest(self.folder)
        if source is None:
            return None
        ranks = len(list(source.glob("rank-*.pt")))
        if ranks != self.communicator.size:
            raise RuntimeError(
                f"{source} was written by {ranks} workers, and there are {self.communicator.size} "
                "now. Each worker has compression errors of its own: continue with "
                f"workers={ranks}, or start again with overwrite=true."
            )
        return torch.load(
            source / f"rank-{self.communicator.rank}.pt", map_location="cpu", weights_only=True
        )

    def delete(self) -> None:
        """Remove all checkpoints."""
        (self.folder / "latest").unlink(missing_ok=True)
        for step in self.folder.glob("step-*"):
            shutil.rmtree(step, ignore_errors=True)

    def _wait_for_all(self) -> None:
        self.communicator.all_gather(torch.zeros(1, dtype=torch.uint8))


def newest(folder: Path) -> Path | None:
    """The folder of the newest complete checkpoint; None if there is none."""
    latest = folder / "latest"
    return folder / latest.read_text() if latest.exists() else None


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write under another name first, so that the file is complete or absent."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)
