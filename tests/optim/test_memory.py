"""Frozen state is small: what all tensors of a process hold, counted in bytes."""

import gc
import time

import pytest
import torch
from helpers.cases import more
from helpers.launch import BACKENDS

import onebit

SHAPES = [(1000, 700), (300, 1000), (700,), (1000,)]
N = sum(torch.Size(shape).numel() for shape in SHAPES)


def bytes_of_all_tensors():
    """Bytes of the distinct storages of all tensors that live in this process."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_bytes(communicator, overlap, synchronize):
    """Bytes beside parameters and gradients, per element, after each of five steps, the second
    of which freezes the variance.
    """
    before = bytes_of_all_tensors()
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = onebit.OneBitAdam(params, warmup=2, communicator=communicator, overlap=overlap)
    found = []

    def look():
        time.sleep(
            0.1
        )  # a thread of gloo's may hold the tensors of the last collective for a moment longer
        found.append((bytes_of_all_tensors() - before) / N - 8)

    for t in range(5):
        generator = torch.Generator().manual_seed(10 * t + communicator.rank)
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()
        optimizer.step()
        look()
        optimizer.zero_grad(set_to_none=False)
    if synchronize:
        optimizer.state_dict()
        optimizer.synchronize()
        look()
    return found


@pytest.mark.parametrize("size", [1, 4, *more(2)])
def test_after_the_freeze_the_state_is_variance_error_and_bits(size):
    """Variance 4, worker error 4, packed momentum 1/8, mask 1/8, server error 4/W bytes an
    element.

    Reading the state leaves nothing behind.
    """
    for found in BACKENDS["gloo"](size, state_bytes, False, True):
        assert all(value <= 8.3 + 4 / size for value in found[2:]), found


def test_overlap_keeps_the_errors_twice():
    """Out of place: 4 + 4/W more."""
    size = 4
    for found in BACKENDS["gloo"](size, state_bytes, True, False):
        assert all(value <= 8.3 + 4 / size + 4 + 4 / size for value in found[2:]), found
