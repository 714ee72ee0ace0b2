"""The kernels for the CPU, compiled by numba: the bits of `torch_ops` in one pass over the memory.

The docstrings of `torch_ops` define the functions. Here each fills in a record, the task, with the
addresses of all arrays; `loops` and `family` have the compiled loops that work on it, and `task`
and `vectors` what those are made of.

The loops run on torch's own threads. torch keeps a team of OpenMP threads, which wait actively for
milliseconds after every operation; threads of our own would compete with them for the cores. numba
cannot join that team, but any library in the process can: the OpenMP runtime exports the C function
GOMP_parallel, which calls a function on every thread of the team, and ctypes can call that. Where
there is no such function, and in a forked child, which has none of its parent's threads, Python
threads take their place.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.cpu import loops as cpu_loops
from onebit.kernels.torch_ops import Numbers, Tensors, Terms, dtype_of
from onebit.layout import Partition

# With fewer elements it takes longer to wake a thread than to do its part of the work.
ELEMENTS_PER_THREAD = 1 << 17
# Each thread takes several parts, so that a thread that is held up delays the others little.
PARTS_PER_THREAD = 8
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def measure(partition: Partition, gradients: Tensors) -> Tensor:
    """See `torch_ops.measure`."""
    task, totals = _Task(partition, dtype_of(gradients)), torch.empty(2, dtype=torch.float64)
    task.tensors(gradients)
    task.set(
        sums=np.empty(len(partition.blocks)),
        late=np.empty(len(partition.blocks), np.int64),
        totals=totals,
    )
    task.run(cpu_loops.measure)
    task.run(cpu_loops.total, threads=1)
    return totals


def compress(
    partition: Partition, terms: Terms, compensated: Tensor, scales: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `torch_ops.compress`."""
    task = _Task(partition, compensated.dtype)
    task.tensors(terms.gradients)
    weights = [0.0 if g is None else weight for g, weight in zip(terms.gradients, terms.weights)]
    task.numbers(weights=[*weights, 0.0])
    if terms.momentum is not None:
        task.message("incoming", terms.momentum)
        task.numbers(betas=[*terms.betas, 0.0])
    if terms.path is None:
        return _compress(cpu_loops.compress, task, compensated, scales, out)
    path = terms.path
    task.numbers(
        beta1s=[*path.betas, 0.0],
        rest1s=[*path.rests, 0.0],
        rates=[*path.rates, 0.0],
        path_totals=[*path.totals, 0.0],
    )
    task.set(momentum=path.momentum)
    if path.accumulator is not None:
        task.set(accumulator=path.accumulator)
    return _compress(cpu_loops.compress_path, task, compensated, scales, out)


def average(
    partition: Partition, received: Tensor, compensated: Tensor, scales: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `torch_ops.average`."""
    task = _Task(partition, compensated.dtype)
    task.message("incoming", received)
    task.set(row_count=len(received))
    return _compress(cpu_loops.average, task, compensated, scales, out)


def update(
    partition: Partition,
    parameters: Tensors,
    variance: Tensor,
    momentum: Tensor,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """See `torch_ops.update`."""
    task = _Task(partition, variance.dtype)
    values = task.tensors(parameters)
    task.numbers(decays=decays, steps=steps, epsilons=epsilons, limits=limits)
    task.message("incoming", momentum)
    task.set(vector=variance)
    return _moved(cpu_loops.update, task, parameters, values, None)


def adam(
    partition: Partition,
    parameters: Tensors,
    gradient: Tensor,
    momentum: Tensor,
    variance: Tensor,
    beta1s: Numbers,
    beta2s: Numbers,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    roots: Numbers,
) -> None:
    """See `torch_ops.adam`. Padding is computed like elements: it is 0 everywhere and stays 0."""
    task = _Task(partition, variance.dtype)
    values = task.tensors(parameters)
    task.numbers(
        beta1s=beta1s,
        rest1s=[1 - beta for beta in beta1s],
        beta2s=beta2s,
        rest2s=[1 - beta for beta in beta2s],
    )
    task.numbers(decays=decays, steps=steps, epsilons=epsilons, roots=roots)
    task.set(gradient=gradient, momentum=momentum, vector=variance)
    task.run(cpu_loops.adam)
    _write_back(parameters, values)


def zero_one_local(
    partition: Partition,
    parameters: Tensors,
    gradients: Tensors,
    momentum: Tensor,
    accumulator: Tensor,
    variance: Tensor,
    anchor: Tensor | None,
    factor: float,
    only_finite: bool,
    beta1s: Numbers,
    rates: Numbers,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """See `torch_ops.zero_one_local`."""
    task = _Task(partition, variance.dtype)
    task.tensors(gradients)
    values = task.tensors(parameters, "parameters")
    weights, rests = [factor] * len(beta1s), [1 - beta for beta in beta1s]
    task.numbers(weights=weights, beta1s=beta1s, rest1s=rests, rates=rates)
    task.numbers(decays=decays, steps=steps, epsilons=epsilons, limits=limits)
    task.set(momentum=momentum, accumulator=accumulator, vector=variance)
    task.set(only_finite=int(only_finite))
    return _moved(cpu_loops.zero_one_local, task, parameters, values, anchor)


def zero_one_sync(
    partition: Partition,
    parameters: Tensors,
    variance: Tensor,
    payload: Tensor,
    momentum: Tensor,
    anchor: Tensor | None,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """See `torch_ops.zero_one_sync`."""
    task = _Task(partition, variance.dtype)
    values = task.tensors(parameters)
    task.numbers(decays=decays, steps=steps, epsilons=epsilons, limits=limits)
    task.message("incoming", payload)
    task.set(vector=variance, momentum=momentum)
    return _moved(cpu_loops.zero_one_sync, task, parameters, values, anchor)


def _moved(loop, task, parameters, values, anchor):
    """Run a loop that moves the parameters; the number of elements that were bounded."""
    bounded = torch.zeros(len(task.partition.blocks), dtype=torch.int64)
    task.set(bounded=bounded)
    if anchor is not None:
        task.set(anchor=anchor)
    task.run(loop)
    _write_back(parameters, values)
    return bounded.sum()


def lamb_follow(
    partition: Partition,
    before: Tensor,
    after: Tensor,
    variance: Tensor,
    fresh: Tensor,
    beta1s: Numbers,
    beta2s: Numbers,
    epsilons: Numbers,
    of: str,
) -> Tensor:
    """See `torch_ops.lamb_follow`."""
    task = _Task(partition, variance.dtype)
    task.message("before", before)
    task.message("incoming", after)
    task.numbers(beta1s=beta1s, beta2s=beta2s, epsilons=epsilons)
    of_blocks = torch.full((len(partition.blocks),), -torch.inf, dtype=variance.dtype)
    largest = torch.empty(len(partition.lengths), dtype=variance.dtype)
    task.set(
        tensor_count=len(beta1s),
        vector=variance,
        fresh=fresh,
        of_roots=int(of == "root"),
        largest=of_blocks,
        new_scales=largest,
    )
    task.run(cpu_loops.lamb_follow)
    task.run(cpu_loops.largest, threads=1)
    return largest


def _write_back(parameters, values):
    """Copy what a loop has computed back to the parameters that it could not use in place."""
    for x, value in zip(parameters, values):
        if value is not x:
            x.detach().copy_(value)
        elif x is not None:
            torch.autograd.graph.increment_version(x)


def _compress(loop, task, compensated, scales, out):
    partition, dtype = task.partition, compensated.dtype
    rows, pieces = partition.piece_lengths.shape
    payload = torch.empty(rows, partition.row_bytes(1, dtype.itemsize), dtype=torch.uint8)
    payload[:, partition.row_elements // 8 + pieces * dtype.itemsize :] = 0
    new_scales = torch.empty_like(scales)
    task.message("outgoing", payload)
    task.set(
        vector=compensated,
        scales=scales,
        out=out,
        new_scales=new_scales,
        sums=np.empty(len(partition.blocks)),
    )
    task.run(loop)
    task.run(cpu_loops.finish, threads=1)
    return payload, new_scales


class _Task:
    """A `cpu_loops.TASK` for one partition and element type, and the memory that it points to."""

    def __init__(self, partition: Partition, dtype: torch.dtype):
        self.partition, self.dtype = partition, dtype
        if partition not in _tasks_of:
            _tasks_of[partition] = _of_partition(partition)
        self._record = _tasks_of[partition].copy()
        self._owners: list = []  # keeps alive what the record points to

    def set(self, **fields):
        """Numbers are stored as they are, arrays and tensors by their address."""
        self._owners.append(fields)
        for name, value in fields.items():
            self._record[name] = value if isinstance(value, int) else _address(value)

    def numbers(self, **fields):
        """Lists of floats, as T."""
        self.set(
            **{name: np.array(values, dtype=_NUMPY[self.dtype]) for name, values in fields.items()}
        )

    def message(self, name, payload):
        payload = payload.contiguous()
        self._owners.append(payload)
        self._record[name] = (
            _address(payload),
            self.partition.row_elements,
            payload.shape[1],
            self.partition.piece_groups.shape[1],
        )

    def tensors(self, tensors, name="tensors"):
        """Tensors of any type and strides, or None, whose addresses become the field `name`.

        Returns what the loop works on: the tensor itself if it is contiguous and of type T, else a
        contiguous copy of type T.
        """
        values = [
            x
            if x is None or (x.dtype == self.dtype and x.is_contiguous())
            else x.detach().to(self.dtype).contiguous()
            for x in tensors
        ]
        addresses = np.array([0 if x is None else x.data_ptr() for x in values], dtype=np.int64)
        self.set(tensor_count=len(values), **{name: addresses})
        self._owners.append(values)
        return values

    def run(self, loop, threads=None):
        """Run the loop over all blocks, on all of torch's threads if there is enough to do."""
        function, address = loop(_NUMPY[self.dtype]), _address(self._record)
        threads = threads or min(
            torch.get_num_threads(), self.partition.size // ELEMENTS_PER_THREAD
        )
        self.set(next_part=0, parts=PARTS_PER_THREAD * threads if threads > 1 else 1)
        if threads > 1:
            _on_all_threads(function, address)
        else:
            function.ctypes(address)


# partition -> a task with nothing but the partition in it
_tasks_of: WeakKeyDictionary = WeakKeyDictionary()


def _of_partition(partition):
    task = np.zeros(1, cpu_loops.TASK)
    for name in ("blocks", "mask", "counts", "piece_groups"):
        task[name] = _address(getattr(partition, name))
    task["block_count"], task["group_count"], task["piece_count"] = (
        len(partition.blocks),
        len(partition.counts),
        partition.piece_groups.numel(),
    )
    return task


def _address(array):
    """The address of the first element of a contiguous array or tensor."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    assert array.is_contiguous() and array.device.type == "cpu"
    return array.data_ptr()


def _on_all_threads(function, address):
    """Call function(address) on each of torch's threads at once, of which this one is the first."""
    if openmp := _openmp():
        openmp(function.address, address, torch.get_num_threads(), 0)
        return
    others = [_pool().submit(function.ctypes, address) for _ in range(torch.get_num_threads() - 1)]
    try:
        function.ctypes(address)
    finally:
        wait(others)


@cache
def _openmp():
    """void GOMP_parallel(function, argument, threads, flags) of the OpenMP in use, or None.

    It belongs to GNU's OpenMP; LLVM's and Intel's export it too. CDLL(None) searches everything
    that the process has loaded, so that it finds the one that torch uses.
    """
    if _forked:
        return None
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.restype, parallel.argtypes = (
        None,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint),
    )
    return parallel


@cache
def _pool():
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="onebit")


_forked = False


def _after_fork():
    global _forked
    _forked = True
    _openmp.cache_clear()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
