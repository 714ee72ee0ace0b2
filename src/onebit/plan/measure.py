"""What this machine takes: its links, the work of a compressed step, and matrix products.

Run by all processes of torchrun or mpirun.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from onebit.comm import Communicator, Mpi, Single, TorchDistributed
from onebit.comm.base import launched_processes
from onebit.optim.onebit_adam import OneBitAdam

REPETITIONS = 7
SHORT, LONG = 2**8, 2**22  # elements of the vectors that are averaged and compressed
# Set by torchrun, Open MPI and MPICH: the number of processes on this node.
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Measured:
    """What was found, the same on all ranks.

    Attributes:
        rank, size, per_node: of the processes that measured.
        bandwidth, latency: of the slowest link in a ring over them, bits a second and seconds.
        compression: seconds an element by which a compressed step computes longer than Adam's.
        flops: operations a second in a product of matrices.
    """

    rank: int
    size: int
    per_node: int
    bandwidth: float
    latency: float
    compression: float
    flops: float


def connect() -> Communicator:
    """The processes that torchrun or mpirun has started; RuntimeError if none has."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        communicator: Communicator = TorchDistributed(ordered=False)
    elif launched_processes():
        communicator = Mpi(ordered=False)
    else:
        communicator = Single()
    if communicator.size == 1:
        raise RuntimeError(
            "--measure needs several processes, one for each GPU: start them on all nodes, for "
            "example by `torchrun --nproc-per-node 2 -m onebit.plan ...` or "
            "`mpirun -n 2 python -m onebit.plan ...`"
        )
    return communicator


def measure() -> Measured:
    """Time the links, the compressed step and a product of matrices; all ranks call it together."""
    communicator = connect()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    per_node = next((int(os.environ[name]) for name in LOCAL_SIZES if name in os.environ), 1)
    local = [*link(communicator, device), compression(device), flops(device)]
    # The slowest rank counts: the lowest rates and the longest times.
    worst = communicator.all_gather(torch.tensor(local, dtype=torch.float64).view(torch.uint8))
    bandwidth, latency, extra, rate = worst.view(torch.float64).unbind(1)
    found = Measured(
        communicator.rank,
        communicator.size,
        per_node,
        bandwidth.min().item(),
        latency.max().item(),
        extra.max().item(),
        rate.min().item(),
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def link(communicator: Communicator, device: torch.device) -> tuple[float, float]:
    """(bits a second, seconds a message): from all_reduce of a short and of a long vector.

    A ring takes 2 (W - 1) (latency + 8 bytes / W / bandwidth).
    """
    short, long = torch.zeros(SHORT, device=device), torch.zeros(LONG, device=device)
    seconds = [median(lambda x=x: communicator.all_reduce(x), device) for x in (short, long)]
    rounds = 2 * (communicator.size - 1)
    nbytes = rounds * (long.nbytes - short.nbytes) / communicator.size
    return 8 * nbytes / max(seconds[1] - seconds[0], 1e-9), seconds[0] / rounds


def compression(device: torch.device) -> float:
    """Seconds an element that a compressed step of OneBitAdam takes beyond one of fused Adam."""

    def step_of(make):
        p = torch.nn.Parameter(torch.zeros(LONG, device=device))
        p.grad = torch.linspace(-1, 1, LONG, device=device)
        optimizer = make([p])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the variance is frozen")
            optimizer.step()
        return optimizer.step

    ours = step_of(lambda p: OneBitAdam(p, warmup=1, communicator=Single()))
    rival = step_of(lambda p: torch.optim.Adam(p, fused=True))
    return max(median(ours, device) - median(rival, device), 0.0) / LONG


def flops(device: torch.device) -> float:
    """Operations a second in a product of matrices, in bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    n, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a = torch.ones(n, n, device=device, dtype=dtype)
    return 2 * n**3 / median(lambda: a @ a, device)


def median(call: Callable, device: torch.device) -> float:
    """Seconds that a call takes; the first two calls do not count."""
    taken = []
    for i in range(REPETITIONS + 2):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
