"""Processes under mpirun that run one function after the other; and mpirun for any other program.

This file is also the program that the ranks run: `mpi_ranks.py FOLDER TIMEOUT PID`. Job n is the
file FOLDER/n, and rank r writes its outcome into FOLDER/n.r. The ranks end when the process PID
has.
"""

import importlib.util
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import onebit.comm
from helpers.outcomes import has_failed, outcome, results

PAUSE = 0.02


class MpiRanks:
    """`size` processes under one mpirun, of which the first ones may be asked alone."""

    def __init__(self, size, collective_timeout):
        self.folder = tempfile.TemporaryDirectory()
        self.jobs = itertools.count()
        self.output = tempfile.TemporaryFile("w+")
        program = [__file__, self.folder.name, collective_timeout, os.getpid()]
        self.process = start_mpirun(size, program, self.output)

    def run(self, size, fn, args, timeout):
        job = Path(self.folder.name, str(next(self.jobs)))
        write_at_once(job, pickle.dumps((size, fn, args)))
        found, deadline = {}, time.monotonic() + timeout
        while len(found) < size and time.monotonic() < deadline:
            ended = self.process.poll() is not None
            paths = {rank: job.with_suffix(f".{rank}") for rank in range(size)}
            found = {rank: path.read_bytes() for rank, path in paths.items() if path.exists()}
            if ended or any(has_failed(entry) for entry in found.values()):
                break
            time.sleep(PAUSE)
        return results(found, size, timeout, self._said() if len(found) < size else "")

    def _said(self):
        self.output.seek(0)
        return self.output.read()

    def close(self):
        end_mpirun(self.process)
        self.output.close()
        self.folder.cleanup()


def run_mpirun(size, command, timeout=240, env=None):
    """`mpirun -n size python *command` as a CompletedProcess; returncode None: out of time.

    Its stdout holds stderr, too. Skips the test without mpi4py or mpirun.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = start_mpirun(size, command, output, env)
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
            end_mpirun(process)
        output.seek(0)
        return subprocess.CompletedProcess(command, returncode, stdout=output.read())


def start_mpirun(size, command, output, env=None):
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mpirun = shutil.which("mpirun", path=places)
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py or no mpirun: pip install -e '.[mpi]'")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    python = [sys.executable, *map(str, command)]
    launch = [mpirun, *as_root, "--oversubscribe", "-n", str(size), *python]
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        launch, env={**os.environ, **ours, **(env or {})}, stdout=output, stderr=output
    )


def end_mpirun(process):
    """mpirun ends its ranks if it is asked to end."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_at_once(path, data):
    """So that nobody reads the beginning of a file."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    partial.rename(path)


def serve(folder, collective_timeout, parent):
    torch.set_num_threads(1)
    world = onebit.comm.Mpi(timeout=collective_timeout)
    for number in itertools.count():
        job = Path(folder, str(number))
        while not job.exists():
            os.kill(parent, 0)  # raises once the tests have ended
            time.sleep(PAUSE)
        size, fn, args = pickle.loads(job.read_bytes())
        part = world.comm.Split(world.rank < size)
        if world.rank < size:
            communicator = onebit.comm.Mpi(part, timeout=collective_timeout)
            answer = outcome(world.rank, partial(fn, communicator, *args))
            write_at_once(job.with_suffix(f".{world.rank}"), answer)
            if has_failed(answer):
                world.comm.Abort(1)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
