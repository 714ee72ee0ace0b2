"""Ranks that come to differ are found in every phase; an exchange that fails is never silent."""

import math
import multiprocessing
import re
import struct
import sys
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from helpers.small_runs import make, step

import onebit
from onebit.comm import Single, abort_on_error, run_threads

PHASES = [
    (onebit.DistributedAdam, {}),
    (onebit.DistributedAdam, {"check_finite": False}),
    (onebit.DistributedSGD, {}),
    (onebit.Lamb, {}),
    (onebit.OneBitAdam, {"warmup": 100}),
    (onebit.OneBitAdam, {"warmup": 3, "check_finite": False}),
    (onebit.OneBitAdam, {"warmup": 3}),
]


def failing(communicator, change, kind=onebit.OneBitAdam, every=100, steps=12, **options):
    """(step, message) of the error, when rank 1 suffers `change` before step 6."""
    run = make(communicator, kind, **options)
    run.optimizer.check_ranks_every = every
    for t in range(steps):
        if t == 6 and communicator.rank == 1:
            with torch.no_grad():
                change(run)
        try:
            step(run, t, communicator.rank)
        except RuntimeError as error:
            return t, str(error)
    return None


@pytest.mark.report("F08")
@pytest.mark.parametrize("kind, options", PHASES)
@pytest.mark.parametrize("name, value", [("lr", 0.5), ("weight_decay", 0.3)])
def test_options_that_come_to_differ_are_an_error_at_that_step_in_every_phase(
    kind, options, name, value
):
    def change(run):
        run.optimizer.param_groups[0][name] = value

    for t, message in run_threads(2, lambda c: failing(c, change, kind, **options)):
        assert t == 6 and re.search(rf"the ranks differ.*{name}", message)


@pytest.mark.report("B03")
@pytest.mark.parametrize("kind, options", PHASES)
def test_a_parameter_altered_on_one_rank_is_found_at_the_next_comparison(kind, options):
    def change(run):
        run.params[1].view(-1)[0] += 1

    first, other = run_threads(2, lambda c: failing(c, change, kind, every=4, **options))
    assert first == other and 6 <= first[0] <= 8 and "checksum of the parameter" in first[1]
    assert run_threads(2, lambda c: failing(c, change, kind, every=None, **options)) == [None] * 2


def test_options_that_are_equal_but_written_otherwise_do_not_differ():
    def run(communicator):
        p = torch.nn.Parameter(torch.zeros(8))
        same = [
            {"lr": 1, "betas": [0.5, 0.9]},
            {"lr": torch.tensor(1.0), "betas": (0.5, 0.9)},
        ][communicator.rank]
        optimizer = onebit.OneBitAdam([p], warmup=2, communicator=communicator, **same)
        for _ in range(4):
            p.grad = torch.ones(8) + communicator.rank
            optimizer.step()
        return optimizer.steps

    assert run_threads(2, run) == [4, 4]


def broken_step(communicator, nth, bucket_cap_mb):
    """After an error in the nth exchange of a compressed step: what step and state_dict do."""
    run = make(communicator, warmup=3, bucket_cap_mb=bucket_cap_mb)
    for t in range(5):
        step(run, t, communicator.rank)
    count, backend = [0], {name: getattr(communicator, name) for name in NAMES}

    def fails(name, x):
        count[0] += 1
        if count[0] == nth:
            raise RuntimeError("network down")
        return backend[name](x)

    for name in NAMES:
        setattr(communicator, name, lambda x, name=name: fails(name, x))
    with pytest.raises(RuntimeError, match="network down"):
        step(run, 5, communicator.rank)
    for name in NAMES:
        setattr(communicator, name, backend[name])
    found = []
    for call in (run.optimizer.state_dict, lambda: step(run, 5, communicator.rank)):
        try:
            call()
            found.append("whole")
        except RuntimeError as error:
            found.append("broken" if "failed in its middle" in str(error) else str(error))
    return found


NAMES = ("_all_to_all", "_all_gather")


@pytest.mark.report("B02")
@pytest.mark.parametrize(
    "nth, after", [(1, "whole"), (2, "broken"), (3, "broken")], ids=["agree", "send", "gather"]
)
def test_an_exchange_that_fails_leaves_the_optimizer_whole_or_marked_as_broken(nth, after):
    assert run_threads(2, lambda c: broken_step(c, nth, None)) == [[after] * 2] * 2


@pytest.mark.report("B04")
@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize(
    "alter", ["nan", "inf", "negative", "too short", "too long"], ids=lambda x: x.replace(" ", "-")
)
@pytest.mark.parametrize("check_finite", [True, False])
def test_an_altered_message_is_an_error_before_parameters_move(where, alter, check_finite):
    values = {"nan": math.nan, "inf": math.inf, "negative": -1.0}

    def altered(backend, x):
        small, x = x.numel() <= 40, backend(x)
        if small:
            return x
        if alter == "too short":
            return x[:, :-8]
        if alter == "too long":
            return torch.cat([x, x[:, :8]], 1)
        x = x.clone()
        scale = slice(64, 68)  # after the bits of 512 elements
        x[0, scale] = torch.tensor(list(struct.pack("<f", values[alter])), dtype=torch.uint8)
        return x

    def run(communicator):
        p = torch.nn.Parameter(torch.full((1000,), 0.1))
        optimizer = onebit.OneBitAdam(
            [p], warmup=3, check_finite=check_finite, communicator=communicator
        )
        for t in range(6):
            p.grad = torch.randn(1000, generator=torch.Generator().manual_seed(t))
            if t == 5:
                break
            optimizer.step()
        before = p.detach().clone()
        if communicator.rank == 1:
            backend = getattr(communicator, where)
            setattr(communicator, where, partial(altered, backend))
        try:
            optimizer.step()
        except RuntimeError as error:
            found[communicator.rank] = str(error), torch.equal(p, before)

    found = {}
    with suppress(RuntimeError):  # rank 0 may wait for a rank that has failed
        run_threads(2, run)
    message, unmoved = found[1]
    assert "altered" in message and unmoved


@pytest.mark.report("F16")
@pytest.mark.parametrize("options", [{"overlap": True}, {"bucket_cap_mb": 1e-5}])
def test_a_forked_child_can_step(options):
    p, q = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(8))
    optimizer = onebit.OneBitAdam([p, q], warmup=3, communicator=Single(), **options)

    def work():
        (p.sum() + q.sum()).backward()
        optimizer.step()

    work()
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0


@pytest.mark.report("B16")
def test_the_first_error_of_threads_is_the_cause_of_the_others_release():
    causes = []

    def run(communicator):
        if communicator.rank:
            time.sleep(0.2)
            raise ValueError("the first error")
        try:
            communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
        except RuntimeError as error:
            causes.append((str(error), error.__cause__))
            raise

    with pytest.raises(ValueError, match="the first error") as found:
        run_threads(2, run, timeout=30)
    for _ in range(100):
        time.sleep(0 if causes else 0.05)
    assert "released" in causes[0][0] and causes[0][1] is found.value


@pytest.mark.report("B12")
@pytest.mark.parametrize("error, aborts", [(SystemExit(1), 1), (KeyboardInterrupt(), 1)])
def test_every_kind_of_error_ends_the_job_and_a_good_exit_does_not(error, aborts, capsys):
    class Job:
        calls = 0
        comm = property(lambda self: self)

        def Abort(self, code):
            self.calls += 1

    job = Job()
    with abort_on_error(job):
        raise error
    assert job.calls == aborts
    with pytest.raises(SystemExit), abort_on_error(job):
        sys.exit(0)
    assert job.calls == aborts
