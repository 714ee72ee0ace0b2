"""Checkpoints: a folder for each step, in it a file for each rank, and `latest`, which names the newest whole one.

checkpoints/step-00000400/rank-0.pt ...        checkpoints/latest
"""

import os
import shutil
from pathlib import Path

import torch

from onebit.comm import Communicator

KEPT = 2


class Checkpoints:
    def __init__(self, folder: Path, communicator: Communicator):
        self.folder = folder
        self.communicator = communicator

    def save(self, step: int, state: dict) -> None:
        """Save this rank's state. All ranks must call it; `latest` moves on once all have written."""
        target = self.folder / f"step-{step:08d}"
        target.mkdir(parents=True, exist_ok=True)
        _write(target / f"rank-{self.communicator.rank}.pt", lambda path: torch.save(state, path))
        self._wait_for_all()
        if self.communicator.rank == 0:
            _write(self.folder / "latest", lambda path: path.write_text(target.name))
            for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
                shutil.rmtree(old)

    def load(self) -> dict | None:
        """This rank's state in the newest whole checkpoint; None if there is none.

        Raises RuntimeError if another number of workers has written it.
        """
        source = newest(self.folder)
        if source is None:
            return None
        ranks = len(list(source.glob("rank-*.pt")))
        if ranks != self.communicator.size:
            raise RuntimeError(
                f"{source} was written by {ranks} workers, and there are {self.communicator.size}: each has compression "
                f"errors of its own. Go on with workers={ranks}, or start anew with overwrite=true."
            )
        return torch.load(
            source / f"rank-{self.communicator.rank}.pt", map_location="cpu", weights_only=True
        )

    def delete(self) -> None:
        (self.folder / "latest").unlink(missing_ok=True)
        for step in self.folder.glob("step-*"):
            shutil.rmtree(step, ignore_errors=True)

    def _wait_for_all(self) -> None:
        self.communicator.all_gather(torch.zeros(1, dtype=torch.uint8))


def newest(folder: Path) -> Path | None:
    """Where the newest whole checkpoint is; None if there is none."""
    latest = folder / "latest"
    return folder / latest.read_text() if latest.exists() else None


def _write(path: Path, write) -> None:
    """Under another name first, so that a file is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)
