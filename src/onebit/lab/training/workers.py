"""The workers of a run: `comm=threads|gloo|nccl|mpi` chooses one of these classes.

Each class has `workers`, their number; `leads`, whether this process holds the lock of the run's
folder; and `run(work)`, which calls work(communicator, turn) on every worker that lives in this
process or is started by it. `turn` is a lock: workers that share a process, and so torch's random
state, hold it while they compute. If a worker fails, all stop, and `run` raises, or the process
ends with the worker's traceback.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from onebit.comm import Communicator, Mpi, TorchDistributed, abort_on_error, run_threads
from onebit.comm.base import launched_processes

DEFAULT_WORKERS = 4
# Seconds that a worker waits in a collective for the others: the slowest may be reading its data.
TIMEOUT = 600
_GROUPS = itertools.count()  # the groups that this process has joined, the same on all workers
Work = Callable[[Communicator, AbstractContextManager], None]


def hold(folder: Path) -> FileLock:
    """Lock the folder against other runs, until the lock is released or all processes have ended.

    Raises:
        RuntimeError: another run has locked it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise RuntimeError(
            f"another run is writing into {folder}: wait until it has ended, or choose another "
            "folder with output=DIR."
        ) from None
    return lock


class WorkerError(RuntimeError):
    """A worker process has failed; the message holds its traceback."""


class Threads:
    """The workers are threads of this process, which take turns in computing."""

    leads = True

    def __init__(self, *, workers: int | None):
        _refuse_launcher("comm=threads")
        self.workers = _chosen(workers)

    def run(self, work: Work) -> None:
        turn = threading.Lock()
        run_threads(
            self.workers,
            lambda communicator: _work(work, communicator, turn),
            TIMEOUT * self.workers,
        )


class Processes:
    """The workers are processes of a torch.distributed group.

    The group is one that exists, or torchrun's, or else its processes are started here.

    backend: gloo or nccl.
    start: how processes are started here. "fork" is quick, since they need not import anything
        again; "spawn" is for GPUs, which do not survive a fork.
    """

    def __init__(self, *, workers: int | None, backend: str, start: str):
        if backend == "nccl" and not torch.cuda.is_available():
            raise RuntimeError(
                "comm=nccl needs GPUs, and this machine has none: use comm=gloo or comm=threads."
            )
        self.backend = backend
        self.start = start
        self.launched = dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
        if self.launched:
            size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
            self.workers = _same(
                workers, size, f"torchrun --nproc-per-node {workers} -m onebit.lab.train ..."
            )
        else:
            _refuse_launcher(f"comm={backend}")
            self.workers = _chosen(workers)

    @property
    def leads(self) -> bool:
        rank = (
            dist.get_rank()
            if dist.is_initialized()
            else int(os.environ["RANK"])
            if self.launched
            else 0
        )
        return rank == 0

    def run(self, work: Work) -> None:
        if not self.launched:
            return _start_processes(self, work)
        joined_here = not dist.is_initialized()
        if joined_here:
            _bind_gpu(int(os.environ.get("LOCAL_RANK", 0)))
            store, rank, size = next(dist.rendezvous("env://"))
            # torchrun's store outlives a group, and the next one must not meet its keys
            store = dist.PrefixStore(f"onebit/{next(_GROUPS)}", store)
            _join_group(self.backend, store, rank, size)
        _work(work, TorchDistributed(), nullcontext())
        if joined_here:
            dist.destroy_process_group()


class MpiWorld:
    """The workers are the processes that mpirun or srun has started.

    cuda_aware: pass GPU memory to MPI.
    """

    def __init__(self, *, workers: int | None, cuda_aware: bool):
        local = (
            os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK")
            or os.environ.get("MPI_LOCALRANKID")
            or os.environ.get("SLURM_LOCALID")
        )
        _bind_gpu(int(local or 0))
        self.communicator = Mpi(cuda_aware=cuda_aware, timeout=TIMEOUT)
        self.leads = self.communicator.rank == 0
        self.workers = _same(
            workers,
            self.communicator.size,
            f"mpirun -n {workers} python -m onebit.lab.train comm=mpi ...",
        )

    def run(self, work: Work) -> None:
        with abort_on_error(self.communicator):
            _work(work, self.communicator, nullcontext())


def _join_group(backend: str, store: dist.Store, rank: int, size: int) -> None:
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )


def _work(work: Work, communicator: Communicator, turn: AbstractContextManager) -> None:
    # The workers share the cores, and sums do not depend on the number of cores.
    torch.set_num_threads(1)
    work(communicator, turn)


def _chosen(workers: int | None) -> int:
    if workers is None:
        return DEFAULT_WORKERS
    if workers < 1:
        raise ValueError(
            f"workers must be at least 1, not {workers}: leave it out for {DEFAULT_WORKERS}."
        )
    return workers


def _refuse_launcher(choice: str) -> None:
    """Raise RuntimeError under a launcher, whose processes would all train into one folder."""
    launched = launched_processes()
    if launched:
        raise RuntimeError(
            f"{choice} starts its workers itself, but a launcher has started {launched[1]} "
            f"processes ({launched[0]}): use comm=mpi under mpirun or srun, comm=gloo or comm=nccl "
            "under torchrun, or leave the launcher out."
        )


def _same(workers: int | None, size: int, launch: str) -> int:
    if workers not in (None, size):
        raise ValueError(
            f"workers={workers}, but {size} processes were started: leave workers out, or launch "
            f"with\n    {launch}"
        )
    return size


def _bind_gpu(local_rank: int) -> None:
    """Give each process a GPU of its own, which NCCL needs before the group is made."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def _start_processes(world: Processes, work: Work) -> None:
    """Start the workers, wait for all, and end all as soon as one fails."""
    context = multiprocessing.get_context(world.start)
    errors = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        processes = [
            context.Process(
                target=_worker, args=(rank, world, folder, errors, work), name=f"worker {rank}"
            )
            for rank in range(world.workers)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, errors)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _join(processes: list, errors) -> None:
    """Wait until all have ended in order. Raises WorkerError as soon as one has not."""
    running = processes
    while running:
        connection.wait([process.sentinel for process in running])
        # A worker that was killed is named first: the others fail because they have lost it.
        for process in sorted(running, key=lambda process: process.exitcode or 0):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                raise WorkerError(
                    f"{process.name} was ended by {name}, perhaps because memory ran out."
                )
            if process.exitcode:
                raise WorkerError(f"{process.name} failed" if errors.empty() else errors.get())
        running = [process for process in running if process.exitcode is None]


def _worker(rank: int, world: Processes, folder: str, errors, work: Work) -> None:
    # Ctrl-C also reaches the parent process, which ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _bind_gpu(rank)
        if "lo" in (name for _, name in socket.if_nameindex()):
            # All workers are on this machine, whose name may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # a store rather than a URL, which torch would not decode: the path may hold any character
        store = dist.FileStore(str(Path(folder, "rendezvous")), world.workers)
        _join_group(world.backend, store, rank, world.workers)
        _work(work, TorchDistributed(), nullcontext())
        dist.destroy_process_group()
    except BaseException:
        errors.put(f"worker {rank} failed:\n{traceback.format_exc()}")
        sys.exit(1)


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
