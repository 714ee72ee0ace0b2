"""The modules of kernels that run here."""

import pytest
import torch
from helpers.kernel_steps import module


@pytest.fixture(params=["torch_ops", "cpu"])
def kernels(request):
    """Each module of kernels that runs here."""
    return module(request.param)


@pytest.fixture(params=["cpu"])
def compiled(request):
    """Those that are compared with `torch_ops`."""
    return module(request.param)


@pytest.fixture
def cpu():
    return module("cpu")


@pytest.fixture
def loops(cpu):
    return cpu.cpu_loops


@pytest.fixture(autouse=True)
def one_thread():
    """Most vectors here are short; a test that wants more threads says so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
