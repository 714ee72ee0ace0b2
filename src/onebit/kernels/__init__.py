"""The few one-pass functions that touch every element: `torch_ops` defines them, readable, on any device; `cpu` (numba) and `cuda`
(CuPy) give the same bits in one pass over the memory."""

import warnings
from functools import cache
from importlib import import_module

from onebit.kernels import torch_ops

# kind of device -> (module here, the package that it needs, the extra of onebit that brings it)
COMPILED = {"cpu": ("cpu", "numba", "fast"), "cuda": ("cuda", "cupy", "cuda")}


@cache
def for_device(kind):
    """The kernels for tensors on a kind of device, such as "cuda": compiled ones, or `torch_ops` with a warning."""
    if kind not in COMPILED:
        warnings.warn(
            f"there are no compiled kernels for {kind!r}: compression runs in plain torch, many times slower than it could",
            stacklevel=3,
        )
        return torch_ops
    module, package, extra = COMPILED[kind]
    try:
        return import_module(f".{module}", __name__)
    except (ImportError, OSError) as error:  # llvmlite without its library raises OSError
        warnings.warn(
            f"{package} cannot be imported ({error}): compression runs in plain torch, many times slower than it could. "
            f"Remedy: pip install {package if kind == 'cpu' else 'cupy-cuda13x'}, or the extra onebit[{extra}]",
            stacklevel=3,
        )
        return torch_ops
