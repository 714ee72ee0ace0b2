"""All ranks skip together, clip by one factor, and raise together if their models or options
differ.
"""

import math
import re

import pytest
import torch
from helpers.differing_ranks import differing
from helpers.launch import BACKENDS
from helpers.small_runs import everything, make, same, step

import onebit
from onebit.comm import Single, run_threads


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    "kind, options",
    [
        (onebit.OneBitAdam, {"warmup": 6}),
        (onebit.DistributedAdam, {}),
        (onebit.NaiveOneBitAdam, {}),
    ],
)
def test_one_broken_gradient_makes_all_ranks_skip_and_changes_nothing(bad, kind, options):
    """In the warm-up, at the freeze and in the compressed phase; the next step goes on."""
    places = (3, 6, 9)

    def run(communicator):
        run, found = make(communicator, kind, **options), []
        for t in range(max(places) + 1):
            if t in places:
                before = everything(run), run.optimizer.steps
                broken_step(run, communicator.rank == 1, bad)
                skipped = run.optimizer.last_step_skipped
                found.append((before, (everything(run), run.optimizer.steps), skipped))
            step(run, t, communicator.rank)
            assert not run.optimizer.last_step_skipped
        return found, everything(run)

    for found, end in run_threads(3, run):
        for (before, steps), (after, steps_after), skipped in found:
            assert skipped and steps == steps_after and same(before, after)
            assert not same(end, after)
        assert all(torch.isfinite(x).all() for x in end)


def broken_step(run, here, bad):
    """A step on gradients of 1, one element of which is `bad` if it is to be on this rank."""
    for p in run.params:
        p.grad = torch.ones(p.shape)
    if here:
        run.params[0].grad[2, 3] = bad
    run.optimizer.step()


def test_endless_skipping_is_an_error():
    run = make(Single(), warmup=3)
    for p in run.params:
        p.grad = torch.full(p.shape, math.inf)
    with pytest.raises(RuntimeError, match="in a row"):
        for _ in range(200):
            run.optimizer.step()


@pytest.mark.parametrize("warmup, expected", [(100, "mean"), (1, "local")])
def test_all_ranks_clip_by_one_factor(warmup, expected):
    """Rank 0 has the gradient (100, 0), rank 1 (0, 1), the bound is 1. Warm-up: the mean (50,
    0.5) is clipped to norm 1. Compressed: both by 1 / sqrt((100^2 + 1) / 2), so that the
    momentum stays the mean of equally scaled gradients.
    """

    def run(communicator):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = onebit.OneBitAdam(
            [p],
            warmup=warmup,
            betas=(0.0, 0.5),
            max_grad_norm=1.0,
            communicator=communicator,
            compressor=onebit.compression.Identity,
        )
        for _ in range(2):
            p.grad = torch.tensor([[100.0, 0.0], [0.0, 1.0]][communicator.rank])
            optimizer.step()
        return optimizer.state[p]["exp_avg"]

    mean = torch.tensor([50.0, 0.5])
    factor = 1 / mean.norm() if expected == "mean" else 1 / math.sqrt((100**2 + 1) / 2)
    for momentum in run_threads(2, run):
        torch.testing.assert_close(momentum, mean * factor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda p, o: (p[:1], o), "rank 2 has nothing more"),
        (
            lambda p, o: ([p[0], ("b", torch.nn.Parameter(torch.ones(2, 4)))], o),
            r"rank 2 has b: shape \(2, 4\)",
        ),
        (
            lambda p, o: ([p[0], ("b", torch.nn.Parameter(torch.full((4, 2), 1.5)))], o),
            "rank 2 has b: checksum",
        ),
        (lambda p, o: (p[::-1], o), "rank 0 has a: .* rank 2 has b:"),
        (lambda p, o: (p, {"lr": 0.2}), "lr=0.2"),
        (lambda p, o: (p, {"max_grad_norm": 1.0}), "max_grad_norm=1.0"),
    ],
)
def test_ranks_that_differ_all_raise_and_name_the_first_difference(change, named):
    messages = run_threads(3, lambda c: differing(c, change))
    assert len(set(messages)) == 1 and "broadcast_parameters" in messages[0]
    assert re.search(named, messages[0])


def test_sparse_gradients_raise_on_all_ranks():
    def run(communicator):
        embedding = torch.nn.Embedding(10, 4, sparse=communicator.rank == 1)
        with torch.no_grad():
            embedding.weight.fill_(1.0)
        optimizer = onebit.OneBitAdam(
            embedding.named_parameters(), warmup=3, communicator=communicator
        )
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises((ValueError, RuntimeError), match="sparse"):
            optimizer.step()
        return True

    assert run_threads(2, run) == [True, True]
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        onebit.OneBitAdam(embedding.parameters(), warmup=3).step()


@pytest.mark.parametrize("change", ["lr", "requires_grad", "weight_decay"])
@pytest.mark.parametrize("at", [3, 8])
def test_ranks_whose_options_come_to_differ_raise_at_the_next_step(change, at):
    """In the warm-up and in the compressed phase."""

    def run(communicator):
        run = make(communicator, warmup=6)
        for t in range(12):
            if t == at and communicator.rank == 1:
                if change == "lr":
                    run.optimizer.param_groups[0]["lr"] = 0.5
                elif change == "requires_grad":
                    run.params[1].requires_grad_(False)
                else:
                    run.optimizer.param_groups[0]["weight_decay"] = 0.1
            try:
                step(run, t, communicator.rank)
            except RuntimeError as error:
                assert "the ranks differ" in str(error)
                return t

    assert set(run_threads(2, run)) == {at}


def default_group(communicator):
    optimizer = make(None, warmup=3).optimizer
    return type(optimizer.communicator).__name__, optimizer.communicator.size


def made_too_early(communicator):
    """An optimizer made before init_process_group would train a model of its own."""
    group = torch.distributed.group.WORLD
    torch.distributed.group.WORLD = None  # as if it did not exist yet
    try:
        run = make(None, warmup=3)
    finally:
        torch.distributed.group.WORLD = group
    with pytest.raises(RuntimeError, match="after init_process_group"):
        step(run, 0, communicator.rank)
    return True


def test_an_optimizer_made_before_the_process_group_raises():
    assert BACKENDS["gloo"](2, made_too_early) == [True, True]


def test_the_default_process_group_is_used():
    assert BACKENDS["gloo"](2, default_group) == [("TorchDistributed", 2)] * 2
