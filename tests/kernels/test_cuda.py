"""Laws of the CUDA kernels that show without a GPU: they compile for every GPU, and run on the CPU
they give the definition's bits.

Run as a program, `python test_cuda.py FOLDER`, it plants faults in the CUDA source and leaves what
they did in the folder.
"""

import ctypes
import importlib.util
import math
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import cuda_on_cpu
from helpers.cases import more
from helpers.kernel_steps import (
    SHAPES,
    Worker,
    assert_bounded_by_hand,
    assert_same,
    zero_one_steps,
)
from helpers.sums import LENGTHS, in_lanes, numbers_to_add

from onebit.kernels import torch_ops
from onebit.layout import BLOCK, Layout

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float64)
CAPABILITIES = [(7, 5), (12, 0), *more((8, 0), (9, 0), (10, 0))]
KERNELS = (
    b"measure",
    b"total",
    b"compress",
    b"average",
    b"scale_groups",
    b"sum_groups",
    b"append_scales",
    b"update",
    b"adam",
)
# what is planted: (in the source, instead)
FAULTS = {
    "no fault": ("", ""),
    "no barrier before the warps' sums are added": ("__syncthreads();", ""),
    "a step of the tree of lanes left out": ("distance = WARP / 2", "distance = WARP / 4"),
    "one element too many": ("row * LANES + lane < real", "row * LANES + lane <= real"),
    "sign(0) = -1": ("__ballot_sync(ALL, c >= 0)", "__ballot_sync(ALL, c > 0)"),
    "a ballot of active threads only": (
        "Word word = __ballot_sync",
        "if (!thread.has(active[i])) continue; Word word = __ballot_sync",
    ),
    "a barrier that some threads do not reach": (
        "if (thread.half == 1) right",
        "if (thread.half == 1 && thread.bit == 7) return sum; right",
    ),
    "moves below the limit are not bounded": ("move < -moves.limit", "false"),
    "the next rank's share": (
        "__shfl_sync(ALL, mine, rank - first)",
        "__shfl_sync(ALL, mine, rank - first + 1)",
    ),
}


def load_check_gpu():
    spec = importlib.util.spec_from_file_location("check_gpu", ROOT / "scripts" / "check_gpu.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


check_gpu = load_check_gpu()
Case = check_gpu.Case
needs_compiler = pytest.mark.skipif(
    cuda_on_cpu.COMPILER is None, reason="no g++ to compile the CUDA source for the CPU"
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return cuda_on_cpu.kernels(tmp_path_factory.mktemp("kernels"), more=CONVERSIONS)


# ---- what a GPU would be given


class Module:
    """In place of cupy.cuda.function.Module: remembers what is loaded and launched."""

    loaded, launched = [], []

    def load(self, code):
        self.loaded.append(code)

    def get_function(self, name):
        return lambda grid, block, args, stream: self.launched.append(
            (name, grid, block, args, stream.ptr)
        )


def with_stand_in(nvrtc=None):
    return cuda_on_cpu.module(
        SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc, function=SimpleNamespace(Module=Module)))
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_for_every_gpu(capability, dtype):
    code = with_stand_in(cuda_on_cpu.Nvrtc()).compiled(dtype, capability)
    assert code.startswith(b"\x7fELF") and all(b".text." + name + b"\0" in code for name in KERNELS)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_operation_is_rounded_on_its_own_and_keeps_subnormals(dtype):
    """In PTX, which a GPU newer than the compiler gets.

    (A float's square is exact in float64, so there fma rounds once as + does.)
    """
    code = with_stand_in(cuda_on_cpu.Nvrtc()).compiled(dtype, (99, 0)).decode()
    arithmetic = set(
        re.findall(r"\b(?:add|sub|mul|fma|mad|div|sqrt|rcp|rsqrt)\.[a-z.]*f(?:32|64)\b", code)
    )
    width = "f64" if dtype == torch.float64 else "f32"
    squares = {"fma.rn.f64"} if dtype == torch.float32 else set()
    assert {f"{name}.rn.{width}" for name in ("add", "sub", "mul", "div", "sqrt")} <= arithmetic
    assert arithmetic <= squares | {
        f"{name}.rn.{w}" for name in ("add", "sub", "mul", "div", "sqrt") for w in ("f32", "f64")
    }


def test_a_source_that_does_not_compile_is_shown_with_the_compilers_words(tmp_path):
    module = with_stand_in(cuda_on_cpu.Nvrtc())
    module.SOURCE = tmp_path / "broken.cu"
    module.SOURCE.write_text("int f() { return nothing; }")
    with pytest.raises(RuntimeError, match=r'broken.cu(.|\n)*identifier "nothing" is undefined'):
        module.compiled(torch.float32, (9, 0))


def test_each_device_compiles_once_for_each_type_and_launches_on_the_current_stream(monkeypatch):
    """Though many threads ask at once."""
    module = with_stand_in()
    module.compiled = lambda dtype, capability: (dtype, capability)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device.index)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    monkeypatch.setattr(Module, "loaded", [])
    monkeypatch.setattr(Module, "launched", [])
    jobs = [
        (name, dtype, torch.device("cuda", i))
        for name in ("measure", "total")
        for dtype in TYPES
        for i in range(2)
    ]
    threads = [
        threading.Thread(target=module.launcher.launch, args=(*job, 5, 256, (1, 2)))
        for job in 4 * jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Module.loaded, key=str) == sorted(
        [(dtype, (9, i)) for dtype in TYPES for i in range(2)], key=str
    )
    assert sorted(Module.launched) == sorted(
        [(name, (5,), (256,), (1, 2), 100 + device.index) for name, _, device in 4 * jobs]
    )


# ---- what it would compute


SMALL_CASES = [
    *[case for case in check_gpu.CASES if case.shapes is check_gpu.ODD_SHAPES and case.ranks < 40],
    *[
        Case(shapes=((n,),), types=(torch.float32,), masked=0.3)
        for n in (1, 65, BLOCK + 1, 100_003)
    ],
    Case(shapes=((0,), (5,), (0, 3)), types=(torch.float16,), ranks=3),
    Case(shapes=((70,),), types=(torch.float32,), ranks=35, steps=1),
    Case(shapes=((40,),) * 150, types=(torch.bfloat16,), steps=2),
]


MORE_CASES = [
    Case(shapes=((n,),), types=(torch.float32,), masked=0.3) for n in (63, 64, BLOCK - 1, BLOCK)
]


@needs_compiler
@pytest.mark.parametrize("case", [*SMALL_CASES, *more(*MORE_CASES)], ids=check_gpu.described)
def test_the_kernels_give_the_bits_of_their_definition(kernels, case):
    assert not check_gpu.differences(
        check_gpu.outcome(case, torch_ops, CPU), check_gpu.outcome(case, kernels, CPU)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_bits_of_their_definition():
    kernels = pytest.importorskip("onebit.kernels.cuda", reason="no CuPy")
    for case in [*SMALL_CASES, *MORE_CASES]:
        assert not check_gpu.differences(
            check_gpu.outcome(case, torch_ops, CPU),
            check_gpu.outcome(case, kernels, torch.device("cuda", 0)),
        ), check_gpu.described(case)


@needs_compiler
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_of_a_group_are_added_in_lanes(kernels, lengths):
    """Up to more of them than a thread loads at the same time."""
    numbers, sums = numbers_to_add(sum(lengths)), torch.empty(len(lengths), dtype=torch.float64)
    ends = torch.tensor(lengths).cumsum(0)
    ranges = torch.stack([ends - torch.tensor(lengths), ends], dim=1)
    arguments = numbers, ranges, torch.tensor(lengths), len(lengths), sums
    kernels._launch("sum_groups", torch.float32, 1, *arguments)
    assert sums.tolist() == [in_lanes(run.tolist()) for run in numbers.split(lengths)]


@needs_compiler
def test_numbers_that_are_not_finite_pass_through_as_defined(kernels):
    layout = Layout([(200,), (300,)], 1)
    worker, g = layout.worker_partition(), torch.linspace(-1, 1, 200)
    g[3], g[5], g[7] = torch.nan, torch.inf, -torch.inf
    found = []
    for module in (torch_ops, kernels):
        c = torch.zeros(layout.size)
        payload, scales = module.compress(
            worker, torch_ops.Terms([g, torch.ones(300)], [1.0, 1.0]), c, torch.zeros(3), c
        )
        found.append(
            [
                module.measure(worker, [g, None]),
                payload[:, : worker.row_elements // 8].double(),
                scales,
                c,
            ]
        )
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(*found))
    assert found[0][2].isnan().tolist() == [True, False, False]


@needs_compiler
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_a_tensors_neighbours_in_memory_are_neither_read_nor_written(kernels, dtype):
    layout = Layout([(100,)], 1)
    worker = layout.worker_partition()
    c, guarded = torch.zeros(layout.size), torch.full((300,), torch.nan, dtype=dtype)
    x = guarded[101:201]  # only element-aligned
    x.fill_(2.0)
    assert kernels.measure(worker, [x]).tolist() == [400.0, 0.0]
    payload, scales = kernels.compress(worker, torch_ops.Terms([x], [1.0]), c, torch.zeros(2), c)
    assert scales.tolist() == [2.0, 0.0]
    numbers = [1.0], [0.5], [0.0], [math.inf]
    kernels.update(worker, [x], torch.ones(layout.size), payload, *numbers)
    assert x.eq(1).all() and guarded[:101].isnan().all() and guarded[201:].isnan().all()


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
def test_a_move_beyond_the_limit_is_brought_to_it_and_counted(kernels, dtype):
    assert_bounded_by_hand(kernels, dtype)


@needs_compiler
def test_an_update_counts_as_a_change_for_autograd(kernels):
    layout = Layout([(8, 8), (8, 8)], 1)
    parameters, worker = [torch.ones(8, 8), torch.ones(8, 8).t()], layout.worker_partition()
    payload = torch_ops.join_payload(
        worker, torch.zeros(layout.size // 8, dtype=torch.uint8), torch.ones(3)
    )
    numbers = [[number] * 2 for number in (1.0, 0.5, 0.0, math.inf)]
    kernels.update(worker, parameters, torch.ones(layout.size), payload, *numbers)
    assert all(x.eq(1.5).all() and x._version > 0 for x in parameters)


@needs_compiler
def test_0_1_adams_passes_give_the_bits_of_their_definition(kernels):
    shapes = SHAPES["around a block"]
    found, expected = (
        zero_one_steps(module, Worker(shapes, 2, mask="random")) for module in (kernels, torch_ops)
    )
    assert_same(found, expected)


CONVERSIONS = """
#define CONVERT(NAME, FROM, TO, BODY) \\
    extern "C" void NAME(const FROM* from, TO* to, long n) { \\
        for (long i = 0; i < n; i++) { BODY; } \\
    }
CONVERT(widen_float16, Half, float, to[i] = widen(from[i]))
CONVERT(widen_bfloat16, Bfloat16, float, to[i] = widen(from[i]))
CONVERT(narrow_float16, REAL, Half, narrow(from[i], to[i]))
CONVERT(narrow_bfloat16, REAL, Bfloat16, narrow(from[i], to[i]))
"""


def converted(kernels, name, x, dtype):
    result = torch.empty(len(x), dtype=dtype)
    library = kernels.launcher.libraries[x.dtype if x.dtype in TYPES else torch.float32]
    getattr(library, name)(
        *(ctypes.c_void_p(t.data_ptr()) for t in (x, result)), ctypes.c_long(len(x))
    )
    return result


@needs_compiler
@pytest.mark.parametrize("half", (torch.float16, torch.bfloat16))
def test_all_numbers_of_16_bits_are_read_and_written_as_by_torch(kernels, half):
    """Read: all bit patterns. Written: those, all ties between neighbours and what is next to a
    tie, and random bits.
    """
    name = str(half).removeprefix("torch.")
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(half)
    wide = patterns.float()
    assert torch.equal(
        converted(kernels, f"widen_{name}", patterns, torch.float32).nan_to_num(9e9),
        wide.nan_to_num(9e9),
    )
    ordered = wide[wide.isfinite()].sort().values
    ties = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    above, below = (
        torch.from_numpy(np.nextafter(ties.numpy(), np.float32(side))) for side in (np.inf, -np.inf)
    )
    noise = (
        torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(0))
        .to(torch.int32)
        .view(torch.float32)
    )
    for x in (wide, ties, above, below, noise):
        for y in (x, x.double() * (1 + 1e-9)):
            found, expected = converted(kernels, f"narrow_{name}", y, half), y.to(half)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(
                found.nan_to_num(1).view(torch.int16), expected.nan_to_num(1).view(torch.int16)
            )


# ---- the tests' own tests


def differences_with(fault, folder):
    there, instead = FAULTS[fault]

    def change(source):
        assert not there or source.count(there) == 1
        return source.replace(there, instead)

    kernels = cuda_on_cpu.kernels(folder, change, types=TYPES[:1])
    case = Case(
        shapes=((63, 65), (129,), (BLOCK,)), types=(torch.float32, torch.bfloat16), ranks=3, steps=2
    )
    return check_gpu.differences(
        check_gpu.outcome(case, torch_ops, CPU), check_gpu.outcome(case, kernels, CPU)
    )


def plant_all(folder):
    """Each in a child of its own, which may abort.

    What happened is left in `folder`, a file for each fault.
    """
    torch.set_num_threads(1)
    for number, fault in enumerate(FAULTS):
        if os.fork():
            continue
        mine = Path(folder, str(number))
        mine.mkdir()
        with open(mine / "said", "w") as said:
            os.dup2(said.fileno(), sys.stderr.fileno())
            print("differs:", differences_with(fault, mine), file=sys.stderr, flush=True)
            os._exit(0)
    for _ in FAULTS:
        os.wait()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """{fault: what the run with it said}"""
    folder = tmp_path_factory.mktemp("faults")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, folder], check=True, timeout=240, env=environment)
    return {
        fault: (folder / str(number) / "said").read_text() for number, fault in enumerate(FAULTS)
    }


@needs_compiler
def test_planted_faults_show(said):
    """As different results, or as an abort of the shim."""
    shown = {fault for fault, words in said.items() if words != "differs: []\n"}
    assert shown == set(FAULTS) - {"no fault"}
    assert all(said[fault].startswith(("differs: ['", "cuda_shim: ")) for fault in shown)


def test_check_gpu_tells_a_wrong_result():
    class Wrong:
        measure, compress, average, adam = (
            torch_ops.measure,
            torch_ops.compress,
            torch_ops.average,
            torch_ops.adam,
        )

        @staticmethod
        def update(partition, parameters, *args):
            bounded = torch_ops.update(partition, parameters, *args)
            parameters[0][0] += 1e-3
            return bounded

    cases = [Case(shapes=((70,), (3,)), types=(torch.float32,))]
    assert [right for _, _, right in check_gpu.check_results(torch_ops, [CPU], cases)] == [True]
    [(_, result, right)] = check_gpu.check_results(Wrong, [CPU], cases)
    assert not right and "WRONG" in result and "update, step 0" in result


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "python, says",
    [
        (sys.executable, "no NVIDIA GPU"),
        ("/nowhere/python", "make setup"),
        ("/bin/false", "no PyTorch"),
    ],
)
def test_check_gpu_says_what_is_missing(python, says):
    process = subprocess.run(
        [ROOT / "scripts" / "check_gpu.sh"],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 2 and says in process.stderr


if __name__ == "__main__":
    plant_all(sys.argv[1])
