"""Runs to come: their options, their run.json, and whether they will be comparable."""

import os
from pathlib import Path

from omegaconf import OmegaConf

from onebit.lab.config import composed, plain
from onebit.lab.report.artifact import overrides_of
from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.load import TUNING_SEED
from onebit.lab.runs.metadata import ROOT, read_run
from onebit.lab.training.run import run_from
from onebit.lab.training.workers import DEFAULT_WORKERS


def arguments(
    experiment: str, optimizer: str, profile: str, seed: int, workers: int, folder: Path
) -> list[str]:
    """The options of onebit.lab.train for one run, whose folder is given relative to ROOT."""
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


def workers_of(experiment: str, profile: str) -> int:
    """The number of workers that an experiment has at a profile, if none is named."""
    return composed([f"experiment={experiment}", f"profile={profile}"]).workers or DEFAULT_WORKERS


def record_to_come(optimizer: str, workers: int, arguments: list[str]) -> dict:
    """What run.json will say of how a run with these options was trained.

    What it will say of the data is not there, since that takes seconds to read: see `data_to_come`.
    """
    return {"optimizer": optimizer, "workers": workers, "config": plain(composed(arguments))}


def data_to_come(config: dict) -> dict:
    """What run.json of a run with this configuration will say of its data, which is read here.

    Raises:
        RuntimeError: the data or the weights are missing; the message says how to fetch them.
    """
    task = run_from(OmegaConf.create(config)).task
    task.prepare()
    return task.description()


def new_seed(results: Path, experiment: str, profile: str) -> int:
    """The first seed after those of the runs under `results`."""
    folders = (results / "runs" / experiment / profile).glob("*/seed-*")
    seeds = (int(folder.name.removeprefix("seed-")) for folder in folders)
    return max(seeds, default=TUNING_SEED) + 1


def require_comparable(planned: list[dict], kept: list[dict], read_data: bool) -> None:
    """Raise ValueError if the planned runs of an experiment cannot be compared with each other, or
    with those that are kept.

    Args:
        planned: records of `record_to_come`.
        kept: records of runs that are there and stay.
        read_data: also compare the data, which is read for that if there are runs to compare with.
    """
    if kept and read_data:
        data = data_to_come(planned[0]["config"])
        planned = [record | data for record in planned]
    require_alike(kept + planned)


def records_under(results: Path, experiment: str, profile: str) -> list[dict]:
    """The records of all runs that are there, unfinished ones too, but for the tuning seed's."""
    folders = sorted((results / "runs" / experiment / profile).glob("*/seed-*"))
    records = [{**read_run(folder), "folder": os.path.relpath(folder, ROOT)} for folder in folders]
    return [record for record in records if record.get("seed", TUNING_SEED) != TUNING_SEED]
