"""`onebit.kernels.cuda` on the CPU: its CUDA source compiled by g++ with cuda_shim.h, its launches
sent there. No GPU, no CuPy.

kernels = cuda_on_cpu.kernels(folder)       # the module, with the compiled libraries in `folder`
kernels.compress(partition, ...)            # with tensors on the CPU
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import onebit.kernels.torch_ops  # noqa: F401 what cuda.py needs, before sys.modules is put back

SHIM = Path(__file__).with_name("cuda_shim.h")
# -Bsymbolic: the library's own functions, not what the process happens to have under their names,
# such as zlib's compress
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic")
COMPILER = shutil.which("g++")


def module(cupy=None):
    """A fresh onebit.kernels.cuda, with a stand-in for CuPy."""
    spec = importlib.util.find_spec("onebit.kernels.cuda")
    spec = importlib.util.spec_from_file_location("onebit.kernels.cuda_on_cpu", spec.origin)
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"cupy": cupy or ModuleType("cupy")}):
        spec.loader.exec_module(loaded)
    return loaded


def kernels(folder, change=lambda source: source, more="", types=(torch.float32, torch.float64)):
    """The module with its launcher replaced. `change`: of the CUDA source; `more`: C++ to
    compile after it; `types`: of the vectors.
    """
    loaded = module()
    source = change(loaded.SOURCE.read_text())
    loaded.launcher = CpuLauncher(build(Path(folder), source + more, loaded.defines, types))
    return loaded


def build(folder, source, defines, types):
    """{T: the library of the source for T}; they compile at once."""
    names = re.findall(
        r'extern "C" __global__ void(?: __launch_bounds__\(.*?\))?\s+(\w+)\(', source
    )
    (folder / "kernels.cu").write_text(source)
    (folder / "library.cpp").write_text(
        f'#include "{SHIM}"\n#include "{folder}/kernels.cu"\n'
        + "".join(
            f'extern "C" void launch_{name}(unsigned grid, unsigned block, const long long* args) '
            f"{{ shim::launch(grid, block, {name}, args); }}\n"
            for name in names
        )
    )
    commands = {
        T: [COMPILER, *FLAGS, *defines(T), "-o", folder / f"{T}.so", folder / "library.cpp"]
        for T in types
    }
    running = [subprocess.Popen(command) for command in commands.values()]
    assert not any([process.wait() for process in running])
    return {T: ctypes.CDLL(str(folder / f"{T}.so")) for T in types}


class CpuLauncher:
    """In place of `onebit.kernels.cuda.Launcher`. The shim runs one kernel at a time."""

    def __init__(self, libraries):
        self.libraries = libraries
        self.lock = threading.Lock()

    def launch(self, name, dtype, device, grid, block, args):
        with self.lock:
            getattr(self.libraries[dtype], f"launch_{name}")(
                grid, block, (ctypes.c_longlong * len(args))(*args)
            )


class Nvrtc:
    """The part of cupy.cuda.nvrtc that cuda.py uses, on NVIDIA's own bindings, which come with
    PyTorch.
    """

    class NVRTCError(Exception):
        pass

    def __init__(self):
        self.api = pytest.importorskip(
            "cuda.bindings.nvrtc", reason="no cuda.bindings, which brings NVIDIA's compiler"
        )
        try:
            self.getVersion()
        except RuntimeError as error:
            pytest.skip(f"no NVRTC library: {error}")

    def call(self, name, *args):
        status, *values = getattr(self.api, "nvrtc" + name)(*args)
        if status != self.api.nvrtcResult.NVRTC_SUCCESS:
            raise self.NVRTCError(str(status))
        return values

    def text(self, name, program):
        buffer = bytes(self.call(f"Get{name}Size", program)[0])
        self.call(f"Get{name}", program, buffer)
        return buffer

    def getVersion(self):
        return tuple(self.call("Version"))

    def getSupportedArchs(self):
        return tuple(self.call("GetSupportedArchs")[0])

    def createProgram(self, source, name, headers, include_names):
        return self.call(
            "CreateProgram", source.encode(), name.encode(), len(headers), headers, include_names
        )[0]

    def compileProgram(self, program, options):
        self.call("CompileProgram", program, len(options), [option.encode() for option in options])

    def destroyProgram(self, program):
        pass

    def getCUBIN(self, program):
        return self.text("CUBIN", program)

    def getPTX(self, program):
        return self.text("PTX", program)

    def getProgramLog(self, program):
        return self.text("ProgramLog", program).decode()
