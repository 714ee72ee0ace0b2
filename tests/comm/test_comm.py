"""Laws of the communicators: the same bytes and bits from threads, gloo and MPI; counted as promised; no hang."""

import functools
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.launch import BACKENDS, run_gloo, run_mpi, run_mpirun, run_threads

from onebit.comm import Mpi, Single, TorchDistributed, default_communicator
from onebit.comm.base import LAUNCHER_VARIABLES

SIZES = (1, 2, 3, 4)
LENGTHS = (0, 1, 2, 7, 1001)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# (x's dtype, the wire's)
REDUCTIONS = [(dtype, None) for dtype in DTYPES] + [
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
]


# What every backend is asked on every rank; the answers are compared with the definitions below.


def message(rank, rows, k):
    """Random bytes [rows, k], not contiguous."""
    generator = torch.Generator().manual_seed(1000 * rank + k)
    return torch.randint(256, (k, rows), generator=generator, dtype=torch.uint8).t()


def numbers(rank, n, dtype):
    """Numbers of many magnitudes, so that the order of a sum shows in its bits; a tenth are subnormal in float16."""
    generator = torch.Generator().manual_seed(2000 * rank + n)
    exponents = torch.linspace(-7, 3, n, dtype=torch.float64)[
        torch.randperm(n, generator=generator)
    ]
    return (torch.randn(n, generator=generator, dtype=torch.float64) * 10**exponents).to(dtype)


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


def answers_of_mpi(communicator):
    """One mpirun for all sizes (it takes seconds to start): the first `size` ranks, and what only MPI is asked."""
    found = {"beside the user's": gathered_beside_the_users_messages(communicator)}
    for size in SIZES:
        part = communicator.comm.Split(communicator.rank < size)
        if communicator.rank < size:
            found[size] = answers(Mpi(part))
    if not torch.cuda.is_available():
        found["no GPU"] = refusal_of_cuda_aware()
        torch.cuda.is_available = lambda: True
        found["not CUDA-aware"] = refusal_of_cuda_aware()
    return found


def gathered_beside_the_users_messages(communicator):
    """The ranks enter a collective of the user's and one of ours in different orders."""
    from mpi4py import MPI

    x = torch.tensor([communicator.rank], dtype=torch.uint8)
    theirs = MPI.COMM_WORLD.Ibarrier() if communicator.rank % 2 else None
    gathered = communicator.all_gather(x)
    (theirs or MPI.COMM_WORLD.Ibarrier()).Wait()
    return gathered.flatten().tolist()


def refusal_of_cuda_aware():
    with pytest.raises(RuntimeError) as caught:
        Mpi(cuda_aware=True)
    return str(caught.value)


@functools.cache
def all_answers(backend, size):
    """A list over ranks."""
    if backend == "mpi":
        return [of_rank[size] for of_rank in all_answers_of_mpi()[:size]]
    return BACKENDS[backend](size, answers)


@functools.cache
def all_answers_of_mpi():
    return run_mpi(max(SIZES), answers_of_mpi, timeout=90)


def ordered_mean(terms, wire):
    """The definition, without chunks or pads: add in rank order, in at least float32; the mean travels too."""
    wire = wire or terms[0].dtype
    wide = torch.promote_types(terms[0].dtype, torch.float32)
    total = functools.reduce(torch.add, [term.to(wire).to(wide) for term in terms])
    return (total / len(terms)).to(wire).to(terms[0].dtype) if len(terms) > 1 else terms[0]


def equal_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_size = pytest.mark.parametrize("size", SIZES)


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


def test_order_of_the_sum_would_show():
    terms = [numbers(rank, 1001, torch.float32) for rank in range(4)]
    assert not torch.equal(ordered_mean(terms, None), ordered_mean(terms[::-1], None))


@every_backend
def test_mean_in_float16_neither_overflows_nor_flushes_to_zero(backend):
    for found in all_answers(backend, 4):
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
    for found in all_answers(backend, 4):
        assert torch.equal(found["large, library"][0], torch.full((5,), 3e4, dtype=torch.float16))
        expected = (
            torch.stack([numbers(rank, 7, torch.bfloat16) for rank in range(4)]).double().mean(0)
        )
        torch.testing.assert_close(
            found["bfloat16, library"][0].double(), expected, rtol=0.03, atol=1e-6
        )


def test_library_mean_of_mpi_refuses_16_bits_with_the_remedy():
    assert "ordered=True" in all_answers("mpi", 4)[0]["16 bits, library"]


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
    """(bytes, dtypes, calls) that torch.distributed was handed, every entry of it being watched, beside the counters."""
    sent, dtypes, calls = 0, set(), 0
    leaving = {  # the part of what is handed over that leaves this rank
        "all_to_all_single": lambda result, x: (
            x.nbytes * (communicator.size - 1) // communicator.size
        ),
        "all_gather_single": lambda result, x: x.nbytes * (communicator.size - 1),
        "all_gather_into_tensor": lambda result, x: x.nbytes * (communicator.size - 1),
        "all_reduce": lambda x: 2 * x.nbytes * (communicator.size - 1) // communicator.size,
    }

    def watched(name):
        original = getattr(dist, name)

        def collective(*tensors, **options):
            nonlocal sent, calls
            sent += leaving[name](*tensors)
            calls += 1
            dtypes.add((name, tensors[-1].dtype))
            return original(*tensors, **options)

        return collective

    prefixes = (
        "all_",
        "broadcast",
        "gather",
        "reduce",
        "scatter",
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_",
    )
    for name in [
        name for name in dir(dist) if name.startswith(prefixes) and callable(getattr(dist, name))
    ]:
        setattr(dist, name, watched(name))
    answers(communicator)
    return (sent, calls), (communicator.bytes_sent, communicator.calls), dtypes


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


def gather(communicator, k=3):
    communicator.all_gather(torch.zeros(k, dtype=torch.uint8))


def rank_1_is_missing(communicator):
    if communicator.rank == 1:
        time.sleep(30)
    gather(communicator)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (run_threads, {"timeout": 0.5}),
        (run_gloo, {"collective_timeout": 1}),
        (run_mpi, {"collective_timeout": 1}),
    ],
)
def test_a_missing_rank_is_an_error_after_the_time_out(run, options):
    started = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match="rank 0.*Every rank must|rank 0 of 2(.|\n)*branch that only some ranks take",
    ):
        run(2, rank_1_is_missing, **options)
    assert time.monotonic() - started < 25


def rank_1_returns_early(communicator):
    if communicator.rank == 1:
        return
    gather(communicator)


def ranks_send_different_lengths(communicator):
    gather(communicator, k=3 + communicator.rank)


@pytest.mark.parametrize("fn", [rank_1_returns_early, ranks_send_different_lengths])
def test_threads_in_different_collectives_are_told_at_once(fn):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 in all_gather .3., rank 1 in"):
        run_threads(3, fn)
    assert time.monotonic() - started < 5


def rank_0_works_on_alone(communicator):
    gather(communicator)
    if communicator.rank == 0:
        time.sleep(0.5)
    return communicator.rank


def test_a_thread_may_work_on_after_the_others_have_returned():
    assert run_threads(3, rank_0_works_on_alone, timeout=0.1) == [0, 1, 2]


def rank_1_fails(communicator):
    gather(communicator)
    if communicator.rank == 1:
        raise KeyError("the first error")
    gather(communicator)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_the_first_error_of_a_rank_is_raised(backend):
    started = time.monotonic()
    with pytest.raises(KeyError, match="the first error"):
        BACKENDS[backend](3, rank_1_fails)
    assert time.monotonic() - started < 15


SCRIPT = """
import sys, time, torch, onebit.comm
communicator = onebit.comm.Mpi(timeout=float(sys.argv[1]))
def train():
    if communicator.rank == 1:
        {rank_1}
    communicator.all_gather(torch.zeros(3, dtype=torch.uint8))
{run}
"""


@pytest.mark.parametrize(
    ("rank_1", "run", "timeout", "message"),
    [
        (
            "raise KeyError('of rank 1')",
            "with onebit.comm.abort_on_error(communicator): train()",
            600,
            "of rank 1",
        ),
        ("time.sleep(600)", "train()", 1, "rank 0 of 2 waited 1.0 s in all_gather"),
    ],
    ids=["error", "missing rank"],
)
def test_mpi_job_ends_with_its_first_error(tmp_path, rank_1, run, timeout, message):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(rank_1=rank_1, run=run))
    job = run_mpirun(2, [script, timeout], timeout=40)
    assert job.returncode, job.stdout
    assert message in job.stdout


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


def default_group(communicator):
    os.environ["WORLD_SIZE"] = str(communicator.size)
    default = default_communicator()
    return type(default), default.rank, default.size


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


def test_a_single_worker_sends_nothing(no_launcher):
    communicator = default_communicator()
    x = numbers(0, 7, torch.float32)
    assert torch.equal(communicator.all_reduce(x, torch.float16), x)
    assert torch.equal(
        communicator.all_to_all(x.view(torch.uint8)[None]), x.view(torch.uint8)[None]
    )
    assert torch.equal(communicator.all_gather(x.view(torch.uint8)), x.view(torch.uint8)[None])
    assert (communicator.bytes_sent, communicator.bytes_received, communicator.calls) == (0, 0, 0)


@pytest.mark.parametrize(
    ("collective", "x", "remedy"),
    [
        ("all_to_all", torch.zeros(1, 4), r"uint8 \[1, k\], not float32 \[1, 4\]"),
        ("all_to_all", torch.zeros(2, 4, dtype=torch.uint8), r"uint8 \[1, k\], not uint8 \[2, 4\]"),
        ("all_gather", torch.zeros(2, 4, dtype=torch.uint8), r"uint8 \[k\], not uint8 \[2, 4\]"),
        ("all_reduce", torch.zeros(4, dtype=torch.int64), r"not int64 \[4\]; convert"),
    ],
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
    with pytest.raises(RuntimeError, match="pip install 'onebit.mpi.'.*mpirun -n 4"):
        Mpi()


@pytest.mark.parametrize("name", LAUNCHER_VARIABLES)
def test_mpi_of_one_process_under_a_launcher_of_several_is_refused(no_launcher, monkeypatch, name):
    alone = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=1)))
    monkeypatch.setitem(sys.modules, "mpi4py", alone)
    monkeypatch.setenv(name, "4")
    with pytest.raises(RuntimeError, match=f"{name}=4, but MPI sees one process.*mpirun"):
        Mpi()


def test_mpi_does_not_meet_the_users_messages():
    for found in all_answers_of_mpi():
        assert found["beside the user's"] == list(range(max(SIZES)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_aware_mpi_is_refused_without_a_gpu_or_support():
    refused = all_answers_of_mpi()[0]
    assert "needs a GPU" in refused["no GPU"]
    assert "MPIX_Query_cuda_support" in refused["not CUDA-aware"]
