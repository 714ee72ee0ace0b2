"""The real DeepSpeed, installed into a folder of its own; tests are skipped where it cannot be."""

import importlib.util
from pathlib import Path

import pytest
from engines import Engines

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_deepspeed.py"


@pytest.fixture(scope="session")
def engines():
    """engines(ranks, function, *args): the function's result on each rank, see `Engines`."""
    spec = importlib.util.spec_from_file_location("install_deepspeed", SCRIPT)
    installer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(installer)
    try:
        folder = installer.install()
    except RuntimeError as error:
        pytest.skip(f"the real DeepSpeed is not here: {error}")
    with Engines(folder) as engines:
        yield engines
