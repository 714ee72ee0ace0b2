"""Short runs of the lab: in threads of this process, or by the command; and what they wrote."""

import csv
import json
import os
import sys
from contextlib import nullcontext
from functools import partial

from onebit.lab.config import composed
from onebit.lab.training.loop import train
from onebit.lab.training.run import run_from


def train_in_threads(options, at_most=None):
    """The run in threads of this process; it breaks off before step `at_most`."""
    run = run_from(composed([*options, "comm=threads"]))
    batch = run.task.batch

    def batch_until(seed, step, *rest):
        if step == at_most:
            raise KeyboardInterrupt
        return batch(seed, step, *rest)

    run.task.batch = batch_until
    run.comm.run(partial(train, run))
    return run


def train_on_rank(communicator, options):
    """This rank's part of the run, where the ranks are not threads."""
    train(run_from(composed([*options, "comm=threads"])), communicator, nullcontext())


def train_command(options):
    return [sys.executable, "-m", "onebit.lab.train", *options]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def record(folder):
    return json.loads((folder / "run.json").read_text())


def rows(folder, name, columns):
    """A CSV without what depends on the clock and the commit."""
    with open(folder / f"{name}.csv", newline="") as file:
        return [
            {key: row[key] for key in columns if key not in ("seconds", "commit")}
            for row in csv.DictReader(file)
        ]
