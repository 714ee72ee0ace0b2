"""Run a function on W ranks: in threads, on gloo processes, under mpirun. A hang is a failure.

    results = BACKENDS["gloo"](3, fn, *args, timeout=60)        # fn(communicator, *args) on each rank, by rank

`fn` must be importable: a function at the top of a module in tests/. The first error of any rank is raised here,
with that rank's traceback as a note. This file is also the program that the ranks of mpirun run.
"""

import functools
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

import onebit.comm

# How long a rank of the processes waits in a collective: shorter than the launchers' own time-outs.
COLLECTIVE_TIMEOUT = 20


def run_threads(size, fn, *args, timeout=60):
    return onebit.comm.run_threads(size, functools.partial(_called_with, fn, args), timeout)


def run_gloo(size, fn, *args, timeout=60, collective_timeout=COLLECTIVE_TIMEOUT):
    """`size` processes of a gloo group, forked from one process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, fn, args, folder, collective_timeout)
        processes = [
            context.Process(target=_gloo_rank, args=(rank, *arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        late = _join_until_error(processes, timeout)
        for process in processes:
            process.kill()
        return _results(Path(folder), size, late, timeout)


def run_mpi(size, fn, *args, timeout=60, collective_timeout=COLLECTIVE_TIMEOUT):
    """`size` processes under the mpirun of this environment. The first error ends them all."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((fn, args, collective_timeout)))
        process = run_mpirun(size, [Path(__file__), folder], timeout)
        late = range(size) if process.returncode is None else []
        return _results(Path(folder), size, late, timeout, process.stdout)


BACKENDS = {"threads": run_threads, "gloo": run_gloo, "mpi": run_mpi}


def run_mpirun(size, command, timeout=60, env=None):
    """`mpirun -n size python *command`: a CompletedProcess, stdout and stderr together; returncode None: out of time.

    Skips the test without mpi4py or mpirun.
    """
    mpirun = shutil.which(
        "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py or no mpirun: pip install -e '.[mpi]'")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [
        mpirun,
        *as_root,
        "--oversubscribe",
        "-n",
        str(size),
        sys.executable,
        *map(str, command),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
            process.terminate()  # mpirun ends its ranks
            _wait_or_kill(process)
        output.seek(0)
        return subprocess.CompletedProcess(command, returncode, stdout=output.read())


def _wait_or_kill(process):
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def _join_until_error(processes, timeout):
    """Wait until all have ended, one has failed, or the time is over: the ranks that still run then."""
    deadline = time.monotonic() + timeout
    running = dict(enumerate(processes))
    while (
        running
        and time.monotonic() < deadline
        and not any(process.exitcode for process in processes)
    ):
        connection.wait(
            [process.sentinel for process in running.values()], deadline - time.monotonic()
        )
        running = {rank: process for rank, process in running.items() if process.is_alive()}
    return list(running)


def _called_with(fn, args, communicator):
    return fn(communicator, *args)


def _gloo_rank(rank, size, fn, args, folder, collective_timeout):
    torch.set_num_threads(1)

    def join_and_call():
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=collective_timeout),
        )
        torch.distributed.barrier()  # a rank that has nothing to do must not leave while another is still connecting
        return fn(onebit.comm.TorchDistributed(), *args)

    sys.exit(_write_outcome(folder, rank, join_and_call) is not None)


def _mpi_rank(folder):
    torch.set_num_threads(1)
    fn, args, collective_timeout = pickle.loads(Path(folder, "job").read_bytes())
    communicator = onebit.comm.Mpi(timeout=collective_timeout)
    if _write_outcome(folder, communicator.rank, lambda: fn(communicator, *args)) is not None:
        communicator.comm.Abort(1)


def _write_outcome(folder, rank, call):
    """Leave (time, result, error) of the call for the launcher; returns the error."""
    result, error = None, None
    try:
        result = call()
    except BaseException as caught:
        error = caught
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
    partial = Path(folder, f"{rank}.partial")
    partial.write_bytes(pickle.dumps((time.monotonic(), result, error)))
    partial.rename(Path(folder, f"{rank}.outcome"))
    return error


def _results(folder, size, late, timeout, output=""):
    outcomes = [
        pickle.loads(path.read_bytes())
        for path in sorted(folder.glob("*.outcome"), key=lambda p: int(p.stem))
    ]
    errors = [(when, error) for when, _, error in outcomes if error is not None]
    if errors:
        raise min(errors, key=lambda entry: entry[0])[1]
    if late:
        raise TimeoutError(
            f"ranks {list(late)} of {size} had not finished after {timeout} s\n{output}"
        )
    if len(outcomes) < size:
        raise RuntimeError(f"only {len(outcomes)} of {size} ranks ended in order\n{output}")
    return [result for _, result, _ in outcomes]


if __name__ == "__main__":
    _mpi_rank(sys.argv[1])
