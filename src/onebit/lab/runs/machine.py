"""The machine and the versions that a run or a measurement is made with."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch


def machine() -> dict:
    """What run.json and the JSON beside a measurement say of the machine and the versions."""
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cpu_family": _first("/proc/cpuinfo", "cpu family"),
        "cpu_model": _first("/proc/cpuinfo", "model"),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": _version("numba"),
    }


def _first(path: str, name: str) -> str | None:
    """The value of the first line 'name : value' of a file of /proc; None if there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name),
        None,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
