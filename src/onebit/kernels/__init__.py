"""The few functions that touch every element of a vector.

`torch_ops` defines them, readable and on any device. `cpu` (numba) and `cuda` (CuPy) give the same
bits in one pass over the memory.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

from onebit.kernels import torch_ops

# kind of device -> (module here, the package that it needs, how to install that)
COMPILED = {
    "cpu": ("cpu", "numba", "pip install numba (it is in the extra 'fast')"),
    "cuda": (
        "cuda",
        "cupy",
        "pip install cupy-cuda13x, or cupy-cuda12x with a PyTorch for CUDA 12 "
        "(they are the extras 'cuda13' and 'cuda12')",
    ),
}


@cache
def for_device(kind: str) -> ModuleType:
    """The kernels for a kind of device, such as "cuda": compiled ones if there are any.

    Otherwise it warns, with the remedy, and returns `torch_ops`.
    """
    if kind not in COMPILED:
        warnings.warn(
            f"there are no compiled kernels for {kind!r}: compression runs in plain torch, which "
            "is many times slower",
            stacklevel=3,
        )
        return torch_ops
    if kind == "cpu" and int(os.environ.get("NUMBA_DISABLE_JIT") or 0):
        warnings.warn(
            "NUMBA_DISABLE_JIT is set, so that nothing can be compiled: compression runs in plain "
            "torch, which is many times slower",
            stacklevel=3,
        )
        return torch_ops
    module, package, remedy = COMPILED[kind]
    try:
        return import_module(f".{module}", __name__)
    except (ImportError, OSError) as error:  # llvmlite without its library raises OSError
        warnings.warn(
            f"{package} cannot be imported ({error}): compression runs in plain torch, which is "
            f"many times slower. To get the compiled kernels: {remedy}",
            stacklevel=3,
        )
        return torch_ops
