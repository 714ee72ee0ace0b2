"""Threads, gloo and MPI give the same bytes and bits, and count what they promise."""

import functools
import math
import time
from fractions import Fraction
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.cases import more
from helpers.launch import BACKENDS, run_gloo, run_mpi, run_threads
from helpers.messages import message, numbers

from onebit.comm import Mpi, TorchDistributed, torch_distributed

SIZES = [1, 3, *more(2, 4)]
LENGTHS = (0, 1, 2, 7, 1001)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# (x's dtype, the wire's)
REDUCTIONS = [(dtype, None) for dtype in DTYPES] + [
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
]


def answers(communicator):
    """{(collective, case): (result, (bytes_sent, bytes_received, calls))}"""
    rank, size = communicator.rank, communicator.size
    found = {}

    def ask(key, collective, *args):
        before = communicator.bytes_sent, communicator.bytes_received, communicator.calls
        result = collective(*args)
        after = communicator.bytes_sent, communicator.bytes_received, communicator.calls
        found[key] = result, tuple(b - a for a, b in zip(before, after, strict=True))

    for k in LENGTHS:
        ask(("all_to_all", k), communicator.all_to_all, message(rank, size, k))
        ask(("all_gather", k), communicator.all_gather, message(rank, 1, k)[0])
        for dtype, wire in REDUCTIONS:
            ask(("mean", k, dtype, wire), communicator.all_reduce, numbers(rank, k, dtype), wire)
    ask("matrix", communicator.all_reduce, numbers(rank, 15, torch.float32).view(3, 5).t())
    ask("large", communicator.all_reduce, torch.full((5,), 3e4, dtype=torch.float16))
    ask("small", communicator.all_reduce, torch.full((5,), 1e-7, dtype=torch.float16))
    communicator.ordered = False
    for dtype in (torch.float32, torch.float64):
        ask(("library mean", dtype), communicator.all_reduce, numbers(rank, 1001, dtype))
    try:
        ask("large, library", communicator.all_reduce, torch.full((5,), 3e4, dtype=torch.float16))
        ask("bfloat16, library", communicator.all_reduce, numbers(rank, 7, torch.bfloat16))
    except RuntimeError as error:
        found["16 bits, library"] = str(error)
    return found


def gathered_beside_the_users_messages(communicator):
    """The ranks enter a collective of the user's and one of ours in different orders."""
    from mpi4py import MPI

    x = torch.tensor([communicator.rank], dtype=torch.uint8)
    theirs = MPI.COMM_WORLD.Ibarrier() if communicator.rank % 2 else None
    gathered = communicator.all_gather(x)
    (theirs or MPI.COMM_WORLD.Ibarrier()).Wait()
    return gathered.flatten().tolist()


@functools.cache
def all_answers(backend, size):
    """A list over ranks."""
    return BACKENDS[backend](size, answers)


def ordered_mean(terms, wire):
    """The definition, without chunks or pads: add in rank order, in at least float32.

    The mean travels too.
    """
    wire = wire or terms[0].dtype
    wide = torch.promote_types(terms[0].dtype, torch.float32)
    total = functools.reduce(torch.add, [term.to(wire).to(wide) for term in terms])
    return (total / len(terms)).to(wire).to(terms[0].dtype) if len(terms) > 1 else terms[0]


def equal_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_size = pytest.mark.parametrize("size", SIZES)


@pytest.mark.report("R58")
@every_backend
@every_size
def test_row_j_goes_to_rank_j_and_row_i_came_from_rank_i(backend, size):
    for rank, found in enumerate(all_answers(backend, size)):
        for k in LENGTHS:
            sent = [message(sender, size, k) for sender in range(size)]
            assert equal_bits(found["all_to_all", k][0], torch.stack([x[rank] for x in sent]))
            gathered = torch.stack([message(sender, 1, k)[0] for sender in range(size)])
            assert equal_bits(found["all_gather", k][0], gathered)


@every_backend
@every_size
def test_ordered_mean_has_the_bits_of_its_definition_on_every_rank(backend, size):
    for found in all_answers(backend, size):
        for n in LENGTHS:
            for dtype, wire in REDUCTIONS:
                expected = ordered_mean([numbers(rank, n, dtype) for rank in range(size)], wire)
                assert equal_bits(found["mean", n, dtype, wire][0], expected), (n, dtype, wire)
        matrices = [numbers(rank, 15, torch.float32).view(3, 5).t() for rank in range(size)]
        assert equal_bits(found["matrix"][0], ordered_mean(matrices, None))


def means_in_place(communicator):
    """{(n, dtype, wire): (the mean, bytes_sent, calls)}, in many pieces."""
    found = {}
    with mock.patch.multiple(torch_distributed, PIECE=64, DEPTH=2):
        for n, (dtype, wire) in product((7, 1200), REDUCTIONS):
            sent, calls = communicator.bytes_sent, communicator.calls
            own = numbers(communicator.rank, n, dtype)
            # of x there are only elements 3 and 900 to 999, if there are so many
            x, parts = own.clone(), [(0, own[:3]), (4, own[4:900]), (1000, own[1000:])]
            parts, before = [(start, part) for start, part in parts if len(part)], own.clone()
            for start, part in parts:
                x[start : start + len(part)] = math.nan
            assert communicator.all_reduce_in_place(x, wire, parts) is x
            assert torch.equal(own, before)
            found[n, dtype, wire] = x, communicator.bytes_sent - sent, communicator.calls - calls
    return found


@every_backend
@every_size
def test_mean_in_place_is_the_ordered_mean(backend, size):
    for found in BACKENDS[backend](size, means_in_place):
        for (n, dtype, wire), (mean, sent, calls) in found.items():
            expected = ordered_mean([numbers(rank, n, dtype) for rank in range(size)], wire)
            assert equal_bits(mean, expected), (n, dtype, wire)
            assert sent == 2 * (size - 1) * -(-n // size) * (wire or dtype).itemsize
            assert calls == 2 * (size > 1)


def test_order_of_the_sum_would_show():
    terms = [numbers(rank, 1001, torch.float32) for rank in range(4)]
    assert not torch.equal(ordered_mean(terms, None), ordered_mean(terms[::-1], None))


@pytest.mark.report("R20")
@every_backend
def test_mean_in_float16_neither_overflows_nor_flushes_to_zero(backend):
    for found in all_answers(backend, 3):
        assert torch.equal(found["large"][0], torch.full((5,), 3e4, dtype=torch.float16))
        assert torch.equal(found["small"][0], torch.full((5,), 1e-7, dtype=torch.float16))
        assert found["small"][0].all()


@every_backend
@every_size
def test_library_mean_is_the_mean_and_the_same_on_every_rank(backend, size):
    of_ranks = all_answers(backend, size)
    for dtype in (torch.float32, torch.float64):
        key = "library mean", dtype
        terms = [numbers(rank, 1001, dtype) for rank in range(size)]
        tolerance = 4 * torch.finfo(dtype).eps * torch.stack(terms).abs().amax(0)
        for found in of_ranks:
            assert ((found[key][0] - torch.stack(terms).double().mean(0)).abs() <= tolerance).all()
            assert equal_bits(found[key][0], of_ranks[0][key][0])


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_library_mean_divides_float16_before_the_sum(backend):
    for found in all_answers(backend, 3):
        assert torch.equal(found["large, library"][0], torch.full((5,), 3e4, dtype=torch.float16))
        expected = (
            torch.stack([numbers(rank, 7, torch.bfloat16) for rank in range(3)]).double().mean(0)
        )
        torch.testing.assert_close(
            found["bfloat16, library"][0].double(), expected, rtol=0.03, atol=1e-6
        )


def test_library_mean_of_mpi_refuses_16_bits_with_the_remedy():
    assert "ordered=True" in all_answers("mpi", 3)[0]["16 bits, library"]


@every_backend
@every_size
def test_counters_are_the_promised_bytes(backend, size):
    for found in all_answers(backend, size):
        for k in LENGTHS:
            calls = int(size > 1 and k > 0)
            assert found["all_to_all", k][1] == ((size - 1) * k, (size - 1) * k, calls)
            assert found["all_gather", k][1] == ((size - 1) * k, (size - 1) * k, calls)
            for dtype, wire in REDUCTIONS:
                nbytes = 2 * (size - 1) * -(-k // size) * (wire or dtype).itemsize
                assert found["mean", k, dtype, wire][1] == (nbytes, nbytes, 2 * calls)
        for dtype in (torch.float32, torch.float64):
            nbytes = 2 * (size - 1) * 1001 * dtype.itemsize // size
            assert found["library mean", dtype][1] == (nbytes, nbytes, int(size > 1))


def watched_bytes(communicator):
    """(bytes, dtypes, calls) that torch.distributed was handed, every entry of it being
    watched, beside the counters.
    """
    sent, dtypes, calls = 0, set(), 0
    others = communicator.size - 1
    leaving = {  # the part of what is handed over that leaves this rank
        "isend": lambda x: x.nbytes,
        "irecv": lambda x: 0,
        "all_reduce": lambda x: 2 * x.nbytes * others // communicator.size,
    }
    share_of_a_call = {"isend": Fraction(1, others), "irecv": 0, "all_reduce": 1}

    def watched(name):
        original = getattr(dist, name)

        def collective(*tensors, **options):
            nonlocal sent, calls
            sent += leaving[name](*tensors)
            calls += share_of_a_call[name]
            dtypes.add((name, tensors[-1].dtype))
            return original(*tensors, **options)

        return collective

    prefixes = "all_ broadcast gather reduce scatter send recv isend irecv batch_".split()
    entries = [name for name in dir(dist) if name.startswith(tuple(prefixes))]
    collectives = {name: watched(name) for name in entries if callable(getattr(dist, name))}
    with mock.patch.multiple(dist, **collectives):
        answers(communicator)
    return (sent, calls), (communicator.bytes_sent, communicator.calls), dtypes


@pytest.mark.report("R13")
def test_counters_are_the_bytes_handed_to_torch_distributed():
    for seen, counted, dtypes in run_gloo(3, watched_bytes):
        assert seen == counted
        exchanged = {dtype for name, dtype in dtypes if name != "all_reduce"}
        assert exchanged == {torch.uint8}
        assert ("all_reduce", torch.float16) in dtypes


def results_after_everyone_scribbles(communicator):
    x = message(communicator.rank, communicator.size, 9).contiguous()
    results = [
        communicator.all_to_all(x),
        communicator.all_gather(x[0]),
        communicator.all_reduce(x.double()),
    ]
    kept = [result.clone() for result in [x, *results]]
    communicator.all_gather(torch.zeros(1, dtype=torch.uint8))  # everyone has its copies
    if communicator.rank == 0:
        for tensor in [x, *results]:
            tensor.fill_(77)
    communicator.all_gather(torch.zeros(1, dtype=torch.uint8))  # rank 0 has scribbled
    return kept, [x, *results]


@every_size
def test_results_belong_to_the_rank_that_got_them(size):
    for kept, later in run_threads(size, results_after_everyone_scribbles)[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept, later, strict=True))


def mean_in_my_half(communicator):
    """Ranks 0 and 2, and 1 and 3, reduce vectors of different lengths at different times."""
    rank = communicator.rank
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = TorchDistributed(halves[rank % 2])
    for _ in range(3):
        time.sleep(0.2 * (rank % 2))
        mean = mine.all_reduce(torch.full((5 + rank % 2,), float(rank)))
    with pytest.raises(ValueError, match=f"global rank {rank} is not in this process group"):
        TorchDistributed(halves[1 - rank % 2])
    return mine.rank, mine.size, mean


def test_disjoint_groups_do_not_meet():
    for rank, (group_rank, group_size, mean) in enumerate(run_gloo(4, mean_in_my_half)):
        assert (group_rank, group_size) == (rank // 2, 2)
        assert torch.equal(mean, torch.full((5 + rank % 2,), 1.0 + rank % 2))


def gathered_beside_the_users_message(communicator):
    """Rank 0 has sent a message of its own, which rank 1 receives after the collective."""
    rank = communicator.rank
    mine = torch.full((5,), rank, dtype=torch.uint8)
    if rank == 0:
        under_way = dist.isend(mine + 70, 1)
    gathered = communicator.all_gather(mine)[:, 0].tolist()
    if rank == 0:
        under_way.wait()
        return gathered, 70
    message = torch.empty_like(mine)
    dist.recv(message, 0)
    return gathered, int(message[0])


def test_gloo_does_not_meet_the_users_messages():
    assert run_gloo(2, gathered_beside_the_users_message) == [([0, 1], 70)] * 2


def test_mpi_does_not_meet_the_users_messages():
    assert run_mpi(4, gathered_beside_the_users_messages) == [[0, 1, 2, 3]] * 4


def refusals_of_cuda_aware(communicator):
    """What is said without a GPU, and with one beside an MPI that cannot read its memory."""
    with pytest.raises(RuntimeError) as without:
        Mpi(cuda_aware=True)
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        with pytest.raises(RuntimeError) as unable:
            Mpi(cuda_aware=True)
    return str(without.value), str(unable.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_aware_mpi_is_refused_without_a_gpu_or_support():
    for without, unable in run_mpi(4, refusals_of_cuda_aware):
        assert "needs a GPU" in without
        assert "MPIX_Query_cuda_support" in unable
