"""The kernels on NVIDIA GPUs: onebit.cu, compiled by CuPy's NVRTC, on torch's current stream.

`torch_ops` defines what they compute. Nothing here waits for the device: what changes from call to
call, such as the addresses of the gradients, goes there in one copy from pinned memory. Gradients
and parameters are used where they are, unless they are not contiguous or have a type that the
kernels do not know; those are copied. As with any torch function, all memory is allocated, used and
freed on the current stream, and a tensor that was made on another stream must be recorded on it.
"""

import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import torch
from torch import Tensor

from onebit.kernels.torch_ops import (
    Numbers,
    Tensors,
    Terms,
    combine,
    dtype_of,
    # in plain torch here:
    lamb_follow,  # noqa: F401
    zero_one_local,  # noqa: F401
    zero_one_sync,  # noqa: F401
)
from onebit.layout import ALIGNMENT, Partition

SOURCE = Path(__file__).with_name("onebit.cu")
THREADS = 256  # of one CUDA block, as in the source
TEAMS = THREADS // ALIGNMENT  # table blocks that a CUDA block works on
WARPS = THREADS // 32
TYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4}
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)


# ---- the kernels


def measure(partition: Partition, gradients: Tensors) -> Tensor:
    """See `torch_ops.measure`."""
    dtype, device = dtype_of(gradients), partition.mask.device
    table, _copies = _table(gradients, dtype, device)
    blocks, groups = len(partition.blocks), len(partition.lengths)
    sums, group_sums, result = (
        torch.empty(size, dtype=torch.float64, device=device) for size in (blocks, groups, 2)
    )
    ranges = torch.empty(groups, 2, dtype=torch.int64, device=device)
    late = torch.zeros(1, dtype=torch.int64, device=device)
    _launch(
        "measure",
        dtype,
        blocks / TEAMS,
        partition.blocks,
        blocks,
        partition.mask,
        table,
        late,
        sums,
        ranges,
    )
    _launch(
        "sum_groups", dtype, groups / WARPS, sums, ranges, partition.lengths, groups, group_sums
    )
    _launch("total", dtype, 1, group_sums, groups, late, result, threads=32)
    return result


def compress(
    partition: Partition, terms: Terms, compensated: Tensor, scales: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `torch_ops.compress`."""
    if terms.path is not None:  # in plain torch here
        z = combine(partition, terms, out.dtype)
        terms = Terms(z.split(partition.lengths.tolist())[: len(terms.gradients)])
    table, _copies = _table(
        terms.gradients,
        out.dtype,
        out.device,
        terms.weights,
        terms.betas or [0.0] * len(terms.gradients),
    )
    momentum = None if terms.momentum is None else _aligned(terms.momentum)
    return _compensate("compress", partition, (table, momentum), compensated, scales, out)


def average(
    partition: Partition, received: Tensor, compensated: Tensor, scales: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `torch_ops.average`."""
    return _compensate(
        "average", partition, (_aligned(received), len(received)), compensated, scales, out
    )


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
    numbers = decays, steps, epsilons, limits
    table, tensors = _table(parameters, variance.dtype, variance.device, *numbers)
    bounded = torch.zeros((), dtype=torch.int64, device=variance.device)
    _launch(
        "update",
        variance.dtype,
        len(partition.blocks) / TEAMS,
        *_cut(partition),
        table,
        _aligned(momentum),
        variance,
        bounded,
    )
    _write_back(parameters, tensors)
    return bounded


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
    """See `torch_ops.adam`."""
    blocks, rests = (
        len(partition.blocks),
        [[1 - beta for beta in betas] for betas in (beta1s, beta2s)],
    )
    numbers = beta1s, rests[0], beta2s, rests[1], decays, steps, epsilons, roots
    table, tensors = _table(parameters, variance.dtype, variance.device, *numbers)
    _launch(
        "adam",
        variance.dtype,
        blocks / TEAMS,
        partition.blocks,
        blocks,
        partition.mask,
        table,
        gradient,
        momentum,
        variance,
    )
    _write_back(parameters, tensors)


def _write_back(parameters, tensors):
    """Copy the results to those parameters that the kernel could not use in place."""
    for x, written in zip(parameters, tensors):
        if x is not written:
            x.copy_(written)
        elif x is not None:
            # as every torch function does that writes to a tensor
            torch.autograd.graph.increment_version(x)


def _compensate(kernel, partition, source, compensated, scales, out):
    """The pass over the vector, then the scales, which are then written into the payload."""
    dtype, device = out.dtype, out.device
    groups, pieces = len(partition.lengths), partition.piece_groups.numel()
    rows, columns = partition.piece_groups.shape
    payload = torch.empty(
        rows, partition.row_bytes(1, dtype.itemsize), dtype=torch.uint8, device=device
    )
    sums = torch.empty(len(partition.blocks), dtype=torch.float64, device=device)
    ranges = torch.empty(groups, 2, dtype=torch.int64, device=device)
    result = torch.empty(groups, dtype=dtype, device=device)
    _launch(
        kernel,
        dtype,
        len(partition.blocks) / TEAMS,
        *_cut(partition),
        *source,
        compensated,
        scales,
        out,
        payload,
        sums,
        ranges,
    )
    _launch(
        "scale_groups",
        dtype,
        groups / WARPS,
        sums,
        ranges,
        partition.lengths,
        partition.counts,
        groups,
        result,
    )
    _launch(
        "append_scales",
        dtype,
        pieces / THREADS,
        result,
        partition.piece_groups,
        pieces,
        partition.row_elements,
        columns,
        payload,
    )
    return payload, result


# ---- their arguments


def _cut(partition):
    """The arguments that describe a partition to kernels which read or write messages."""
    return (
        partition.blocks,
        len(partition.blocks),
        partition.mask,
        partition.row_elements,
        partition.piece_groups.shape[1],
    )


def _aligned(payload):
    """A payload that can be read in words of 8 bytes."""
    payload = payload.contiguous()
    return payload if payload.data_ptr() % 8 == 0 else payload.clone()


def _table(tensors, dtype, device, *numbers):
    """A table on the device, with a row for each tensor and one for the tail.

    A row is an address, a type and up to 8 numbers: `Tensor` in the source. Returns the table,
    int64 [tensors + 1, 10], and the tensors that it points to, which must live until the launch.
    """
    direct = [None if x is None else _direct(x, dtype, device) for x in tensors]
    host = torch.zeros(len(tensors) + 1, 10, dtype=torch.int64, pin_memory=device.type == "cuda")
    table = host.numpy()
    table[:-1, 0] = [0 if x is None else x.data_ptr() for x in direct]
    table[:-1, 1] = [0 if x is None else TYPES[x.dtype] for x in direct]
    if numbers:
        rounded = torch.tensor(numbers, dtype=dtype).T.double()
        table.view("float64")[:-1, 2 : 2 + len(numbers)] = rounded.numpy()
    return host.to(device, non_blocking=True), direct


def _direct(x, dtype, device):
    """`x` itself where a kernel can use it in place, else a copy that it can use."""
    assert x.device == device, f"a tensor on {x.device} among others on {device}"
    return (x if x.dtype in TYPES else x.to(dtype)).contiguous()


# ---- launches


class Launcher:
    """Launches kernels on the current stream of a device.

    The source is compiled once for each device and type, on first use.
    """

    def __init__(self) -> None:
        self._kernels: dict[tuple, Any] = {}
        self._lock = threading.Lock()

    def launch(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        grid: int,
        block: int,
        args: tuple[int, ...],
    ) -> None:
        """Launch a kernel. `args` are integers of 64 bits, some of which are addresses."""
        with torch.cuda.device(device):
            stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
            self._kernel(name, dtype, device)((grid,), (block,), args, stream=stream)

    def _kernel(self, name, dtype, device):
        key = name, dtype, device.index
        if key not in self._kernels:
            with self._lock:
                module = self._module(dtype, device)
                self._kernels[key] = module.get_function(name)
        return self._kernels[key]

    def _module(self, dtype, device):
        key = dtype, device.index
        if key not in self._kernels:
            module = cupy.cuda.function.Module()
            module.load(compiled(dtype, torch.cuda.get_device_capability(device)))
            self._kernels[key] = module
        return self._kernels[key]


class _Stream(NamedTuple):
    """The one attribute of a stream that CuPy's launch reads.

    CuPy has a wrapper for streams of other libraries, but it differs between versions.
    """

    ptr: int


def compiled(dtype: torch.dtype, capability: tuple[int, int]) -> bytes:
    """The machine code for a GPU of this compute capability, or PTX if NVRTC does not know it yet.

    cupy.RawModule would be shorter, but adds -ftz=true, which sets subnormal numbers to zero.
    """
    nvrtc = cupy.cuda.nvrtc
    wanted = 10 * capability[0] + capability[1]
    target = max(arch for arch in nvrtc.getSupportedArchs() if arch <= wanted)
    kind = "sm" if target == wanted else "compute"
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(
            program, (*OPTIONS, *defines(dtype), f"--gpu-architecture={kind}_{target}")
        )
        return nvrtc.getCUBIN(program) if kind == "sm" else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(
            f"NVRTC {nvrtc.getVersion()} does not compile {SOURCE}:\n{nvrtc.getProgramLog(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def defines(dtype: torch.dtype) -> tuple[str, ...]:
    """The compiler options that choose the type of the vectors' elements."""
    return (f"-DREAL={'double' if dtype == torch.float64 else 'float'}",)


launcher = Launcher()


def _launch(name, dtype, blocks, *args, threads=THREADS):
    """Launch a kernel.

    args: tensors, integers, and None for a null pointer. blocks: of the grid, rounded up here.
    """
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    numbers = tuple(
        0 if arg is None else arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
        for arg in args
    )
    launcher.launch(name, dtype, device, math.ceil(blocks), threads, numbers)
