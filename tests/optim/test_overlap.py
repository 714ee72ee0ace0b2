"""Buckets and overlap change no bit."""

import threading

import pytest
import torch
from helpers.cases import more
from helpers.launch import BACKENDS
from helpers.nets import Net, backward, state_of
from helpers.overlapped import OVERLAP_KINDS, SMALL, make_net
from helpers.small_runs import same

import onebit
from onebit.comm import Single, run_threads
from onebit.optim.bucket import buckets


def train(communicator, kind, options, compress=True, steps=16):
    model, optimizer = make_net(communicator, kind, compress, **options)
    history = []
    for t in range(steps):
        if t == 13:
            optimizer.restart_warmup(1)
        broken = t == 9 and communicator.rank == communicator.size - 1
        backward(
            model,
            t,
            communicator.rank,
            float("nan") if broken else 1.0,
            use_all=(t + communicator.rank) % 3 != 0,
        )
        optimizer.step()
        optimizer.zero_grad()
        traffic = optimizer.communication.last_step
        traffic = (
            None if optimizer.last_step_skipped else (traffic.bytes_sent, traffic.calls)
        )  # with overlap, the buckets have left by then
        history.append(
            (state_of(model, optimizer), optimizer.phase, optimizer.last_step_skipped, traffic)
        )
    return history


def assert_same_history(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a[1:] == b[1:] and same(a[0], b[0])


@pytest.mark.parametrize("kind, options", OVERLAP_KINDS)
@pytest.mark.parametrize("compress", [True, *more(False)])
@pytest.mark.parametrize("size", [3, *more(1, 2)])
def test_overlap_gives_the_bits_of_the_same_buckets_without_it(kind, options, compress, size):
    """Across the freeze, with a parameter that not every rank uses, a skipped step and a new
    warm-up; the same bytes and calls, too.
    """
    options = {**options, "bucket_cap_mb": SMALL}
    without = run_threads(size, lambda c: train(c, kind, options, compress))
    overlapped = run_threads(size, lambda c: train(c, kind, {**options, "overlap": True}, compress))
    for ours, theirs in zip(overlapped, without):
        assert_same_history(ours, theirs)
        assert [skipped for _, _, skipped, _ in ours] == [t == 9 for t in range(16)]


def test_buckets_of_exact_groups_give_the_bits_of_one_bucket():
    """An exact average has no scale that a bucket's edge could change."""
    one = run_threads(2, lambda c: train(c, onebit.DistributedAdam, {}))
    several = run_threads(2, lambda c: train(c, onebit.DistributedAdam, {"bucket_cap_mb": SMALL}))
    for ours, theirs in zip(one, several):
        assert all(same(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_overlap_over_processes_equals_threads_bit_for_bit(backend):
    expected = run_threads(2, overlapped)
    for ours, theirs in zip(BACKENDS[backend](2, overlapped), expected):
        assert_same_history(ours, theirs)


def overlapped(communicator):
    return train(
        communicator, onebit.OneBitAdam, {"warmup": 6, "bucket_cap_mb": SMALL, "overlap": True}
    )


def test_the_users_own_collectives_may_come_between_backward_and_step():
    assert all(BACKENDS["gloo"](2, with_collectives_of_ones_own))


def with_collectives_of_ones_own(communicator):
    model, optimizer = make_net(communicator, warmup=3, bucket_cap_mb=SMALL, overlap=True)
    for t in range(20):
        backward(model, t, communicator.rank)
        loss = torch.tensor([float(communicator.rank)])
        torch.distributed.all_reduce(loss)
        assert loss == 1
        optimizer.step()
        optimizer.zero_grad()
    return True


def test_buckets_leave_during_backward_last_parameters_first():
    """Seen from hooks on the gradients: when the first layer's gradient is made, the last
    buckets have left.
    """
    model, optimizer = make_net(Single(), warmup=2, bucket_cap_mb=SMALL, overlap=True)
    left = []
    model.layers[0].weight.register_hook(
        lambda g: left.append(len(optimizer._run.overlap._started))
    )
    for t in range(4):
        backward(model, t, 0)
        optimizer.step()
        optimizer.zero_grad()
    parts = len(optimizer._run.buckets)
    assert parts >= 6 and left[0] == 0 and all(parts - 3 <= count < parts for count in left[1:])


def test_an_exchange_runs_while_backward_goes_on():
    """Rank 1 begins backward only after rank 0 has finished it, so rank 0 has not waited for it."""
    finished = threading.Event()

    def run(communicator):
        model, optimizer = make_net(communicator, warmup=1, bucket_cap_mb=SMALL, overlap=True)
        backward(model, 0, communicator.rank)
        optimizer.step()
        optimizer.zero_grad()
        if communicator.rank == 1:
            assert finished.wait(60)
        backward(model, 1, communicator.rank)
        finished.set()
        optimizer.step()

    run_threads(2, run)


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_inside_no_sync_equals_the_sum_of_the_gradients(overlap):
    """Powers of two, so that the sums are exact: two backward passes of half the loss each."""

    def run(communicator, parts):
        model, optimizer = make_net(communicator, warmup=4, bucket_cap_mb=SMALL, overlap=overlap)
        for t in range(8):
            for part in range(parts):
                if part < parts - 1:
                    with optimizer.no_sync():
                        (sum((p * (t + 1)).sum() for p in model.parameters()) / parts).backward()
                else:
                    (sum((p * (t + 1)).sum() for p in model.parameters()) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, optimizer)

    for whole, halves in zip(
        run_threads(2, lambda c: run(c, 1)), run_threads(2, lambda c: run(c, 2))
    ):
        assert same(whole, halves)


def test_after_no_sync_buckets_leave_early_again():
    model, optimizer = make_net(Single(), warmup=1, bucket_cap_mb=SMALL, overlap=True)
    for t in range(3):
        with optimizer.no_sync():
            backward(model, t, 0)
        assert not optimizer._run.overlap.is_under_way
        backward(model, t, 0)
        assert optimizer._run.overlap.is_under_way == (t > 0)
        optimizer.step()
        optimizer.zero_grad()


def test_buckets_hold_whole_parameters_up_to_their_cap_from_the_last_to_the_first():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 300, 20, 30, 5)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]

    def sizes(cap):
        return [[[len(p) for p in some] for _, some in bucket] for bucket in buckets(groups, cap)]

    assert sizes(None) == [[[10, 300], [20, 30, 5]]]
    assert sizes(4 * 60) == [[[20, 30, 5]], [[300]], [[10]]]
    assert sizes(4 * 320) == [[[20, 30, 5]], [[10, 300]]]
    assert sizes(1) == [[[5]], [[30]], [[20]], [[300]], [[10]]]


@pytest.mark.parametrize("frozen_at_first", [True, False])
def test_layers_may_be_frozen_and_thawed_between_steps(frozen_at_first):
    """The same bits as without overlap.

    A bucket that cannot begin during backward begins in step().
    """

    def run(communicator, overlap):
        model = Net()
        model.layers[2].requires_grad_(not frozen_at_first)
        optimizer = onebit.OneBitAdam(
            model.parameters(),
            warmup=8,
            bucket_cap_mb=SMALL,
            overlap=overlap,
            communicator=communicator,
        )
        for t in range(12):
            if t == 2:
                model.layers[2].requires_grad_(frozen_at_first)
            if t == 4:
                model.layers[2].requires_grad_(True)
            backward(model, t, communicator.rank)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, optimizer)

    for ours, theirs in zip(
        run_threads(2, lambda c: run(c, True)), run_threads(2, lambda c: run(c, False))
    ):
        assert same(ours, theirs)


def test_compress_may_change_between_steps_of_the_warmup():
    model, optimizer = make_net(Single(), warmup=8, bucket_cap_mb=SMALL, overlap=True)
    for t in range(12):
        optimizer.param_groups[1]["compress"] = t < 4
        backward(model, t, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert [part.compress for part in optimizer._run.buckets].count(
        False
    ) == 2 and optimizer.phase == "compressed"
