"""A missing rank, different collectives or a rank's error end all ranks with a message.

Nothing hangs.
"""

import time

import pytest
import torch
from helpers.launch import BACKENDS, run_gloo, run_mpi, run_threads
from helpers.mpi_ranks import run_mpirun


def gather(communicator, k=3):
    communicator.all_gather(torch.zeros(k, dtype=torch.uint8))


def rank_1_is_missing(communicator):
    if communicator.rank == 1:
        time.sleep(200)
    gather(communicator)


@pytest.mark.report("R34")
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
    assert time.monotonic() - started < 550


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
    assert time.monotonic() - started < 60


def ranks_are_in_different_collectives(communicator):
    x = torch.zeros(communicator.size, 3, dtype=torch.uint8)
    communicator.all_to_all(x) if communicator.rank else communicator.all_gather(x[0])


@pytest.mark.parametrize("fn", [ranks_send_different_lengths, ranks_are_in_different_collectives])
def test_gloo_ranks_that_do_not_meet_are_told_after_the_time_out(fn):
    with pytest.raises(RuntimeError, match="did not enter the same collective"):
        run_gloo(2, fn, collective_timeout=1)


def rank_0_works_on_alone(communicator):
    gather(communicator)
    if communicator.rank == 0:
        time.sleep(1)
    return communicator.rank


def test_a_thread_may_work_on_after_the_others_have_returned():
    assert run_threads(3, rank_0_works_on_alone, timeout=0.5) == [0, 1, 2]


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
    assert time.monotonic() - started < 55


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
    job = run_mpirun(
        2,
        [script, timeout],
    )
    assert job.returncode, job.stdout
    assert message in job.stdout


def test_a_rank_that_catches_the_error_of_a_mismatch_ends_nobody_in_a_deadlock():
    """The other must see the mismatch too, however late it wakes up."""

    def run(communicator):
        if communicator.rank == 0:
            try:
                communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
            except RuntimeError:
                return

    for _ in range(200):
        with pytest.raises(RuntimeError, match="met in different collectives"):
            run_threads(2, run, timeout=60)
