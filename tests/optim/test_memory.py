"""Frozen state is small: what all tensors of a process hold, counted in bytes."""

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from helpers.cases import more
from helpers.launch import BACKENDS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onebit

SHAPES = [(1000, 700), (300, 1000), (700,), (1000,)]
N = sum(torch.Size(shape).numel() for shape in SHAPES)


def bytes_of_all_tensors():
    """Bytes of the distinct storages of all tensors that live in this process."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_bytes(communicator, make, synchronize):
    """Bytes beside parameters and gradients, per element, after each of five steps, the second
    of which freezes the variance.

    make(params, communicator=...) -> optimizer
    """
    before = bytes_of_all_tensors()
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = make(params, communicator=communicator)
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


@pytest.mark.report("R22")
@pytest.mark.parametrize("size", [1, 4, *more(2)])
def test_after_the_freeze_the_state_is_variance_error_and_bits(size):
    """Variance 4, worker error 4, packed momentum 1/8, mask 1/8, server error 4/W bytes an
    element.

    Reading the state leaves nothing behind.
    """
    for found in BACKENDS["gloo"](size, state_bytes, partial(onebit.OneBitAdam, warmup=2), True):
        assert all(value <= 8.3 + 4 / size for value in found[2:]), found


def test_1_bit_lamb_stores_the_fresh_variance_besides():
    """4 bytes an element more than 1-bit Adam."""
    make, size = partial(onebit.OneBitLamb, warmup=2, coefficient_beta=0.1), 2
    for found in BACKENDS["gloo"](size, state_bytes, make, True):
        assert all(value <= 12.3 + 4 / size for value in found[2:]), found


def test_0_1_adam_stores_momentum_and_way_and_last_sync_besides():
    """12 bytes an element more than 1-bit Adam; no flat gradient once the variance is frozen."""
    make, size = partial(onebit.ZeroOneAdam, variance_freeze_step=2, local_step_scaler=2), 2
    for found in BACKENDS["gloo"](size, state_bytes, make, False):
        assert all(value <= 20.3 + 4 / size for value in found[2:]), found


def test_overlap_keeps_the_errors_twice():
    """Out of place: 4 + 4/W more."""
    size, make = 4, partial(onebit.OneBitAdam, warmup=2, overlap=True)
    for found in BACKENDS["gloo"](size, state_bytes, make, False):
        assert all(value <= 8.3 + 4 / size + 4 + 4 / size for value in found[2:]), found


class Live(TorchDispatchMode):
    """Counts the bytes that the results of torch's functions hold, while it is entered."""

    def __init__(self):
        super().__init__()
        self.peak, self._made = 0, []
        self._before = {
            data_pointer(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._made += [weakref.ref(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.peak = max(self.peak, self.now())
        return result

    def now(self):
        """Bytes of the storages that are new since the beginning."""
        living = [x for x in (made() for made in self._made) if x is not None]
        self._made = [weakref.ref(x) for x in living]
        sizes = {data_pointer(x): x.untyped_storage().nbytes() for x in living}
        return sum(size for at, size in sizes.items() if at not in self._before)


def data_pointer(x):
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", [onebit.OneBitAdam, onebit.OneBitLamb, onebit.ZeroOneAdam])
def test_neither_the_freeze_nor_state_dict_takes_much_memory_for_a_moment(make):
    """At most 4 bytes an element more than what stays, with torch's own kernels too."""
    warmup = {"variance_freeze_step": 2} if make is onebit.ZeroOneAdam else {"warmup": 2}
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = make(params, communicator=onebit.comm.Single(), variance_floor=1e-6, **warmup)
    for t in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        if t == 2 and make is not onebit.ZeroOneAdam:
            with torch.no_grad(), Live() as live:
                optimizer._follow_phase()
            assert (live.peak - live.now()) / N <= 4
        optimizer.step()
    with Live() as live:
        state = optimizer.state_dict()
        assert (live.peak - live.now()) / N <= 4
    assert len(state["state"]) == len(SHAPES)
