"""Run functions on the ranks of gloo processes that have the real DeepSpeed.

To import DeepSpeed costs seconds: one process imports it, and forks the ranks of every run.

    with Engines(folder) as engines:
        results = engines(2, fn, *args)         # fn(*args) on each rank, by rank

This file is also the program of that process.
"""

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

COLLECTIVE_TIMEOUT = 60  # seconds that a rank waits for the others


class Engines:
    """The process that has DeepSpeed, from the folder that it is installed in."""

    def __init__(self, folder):
        paths = [str(folder), *(path for path in sys.path if path)]
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"}
            | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __call__(self, ranks, function, *args, timeout=240):
        """The results by rank. The first error of any rank is raised here, with its traceback."""
        job = (ranks, function.__module__, function.__name__, args, timeout)
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            outcomes = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            self._log.seek(0)
            raise RuntimeError(f"the process with DeepSpeed ended: {self._log.read()}") from error
        errors = [error for _, error in outcomes if error is not None]
        if errors:
            raise errors[0]
        return [result for result, _ in outcomes]


def assert_same(ours, theirs):
    """Every number of two engines, bit for bit."""
    import torch

    assert ours["state"].keys() == theirs["state"].keys()
    for name, value in ours["state"].items():
        assert torch.equal(value, theirs["state"][name]), name
    for what in ("model", "copies"):
        assert all(torch.equal(a, b) for a, b in zip(ours[what], theirs[what])), what
    assert [ours[k] for k in ("scale", "phase", "steps")] == [
        theirs[k] for k in ("scale", "phase", "steps")
    ]


def load_kernels():
    """Take steps of one rank, so that no rank has to load the compiled kernels by itself."""
    import runs

    optimizer = runs.single_optimizer()
    for _ in range(3):
        optimizer.step()


def serve(jobs, answers):
    """For each job fork its ranks, wait for them, and answer with their outcomes."""
    while True:
        try:
            ranks, module, name, args, timeout = pickle.load(jobs)
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        with tempfile.TemporaryDirectory() as folder:
            pids = [_fork(rank, ranks, function, args, folder) for rank in range(ranks)]
            late = _wait(pids, folder, timeout)
            outcomes = [_outcome(Path(folder, f"{rank}.pickle"), late) for rank in range(ranks)]
        pickle.dump(outcomes, answers)
        answers.flush()


def _fork(rank, ranks, function, args, folder):
    pid = os.fork()
    if pid:
        return pid
    outcome = None, None
    try:
        outcome = _on_rank(rank, ranks, function, args, folder), None
    except BaseException as error:
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        outcome = None, error
    partial = Path(folder, f"{rank}.partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder, f"{rank}.pickle"))
    os._exit(outcome[1] is not None)


def _on_rank(rank, ranks, function, args, folder):
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # Accelerate asks; none is used
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    torch.distributed.barrier()
    return function(*args)


def _wait(pids, folder, timeout):
    """Until all have ended, one has failed, or the time is over; the others are then killed."""
    deadline, running, failed = time.monotonic() + timeout, set(pids), False
    while running and time.monotonic() < deadline and not failed:
        time.sleep(0.01)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                failed |= status != 0
    if failed:
        time.sleep(0.2)  # the other ranks may be about to raise, too
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)
    return bool(running) and not failed


def _outcome(path, late):
    if path.is_file():
        return pickle.loads(path.read_bytes())
    return None, TimeoutError("a rank had not finished in time") if late else None


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what DeepSpeed prints must not come between the answers
    import deepspeed

    for slow in ("torch._dynamo", "onebit", "runs"):  # what the ranks will need
        importlib.import_module(slow)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo's own, not a C++ build
    load_kernels()
    serve(sys.stdin.buffer, answers)
