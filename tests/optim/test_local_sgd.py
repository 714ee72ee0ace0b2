"""Local SGD equals its reference; between two averages each rank has its own model."""

import numpy as np
import pytest
import torch
from helpers.cases import more, more_of
from helpers.reference_runs import WORLD_SIZES, joined, local_gradient, start_values
from helpers.sgd_runs import (
    PLAIN,
    SGD_GROUPS,
    assert_equals_sgd_reference,
    sgd_reference_options,
    train_sgd,
)
from helpers.small_runs import SMALL_SHAPES, everything, make, resumed, same, saved, step

import onebit
from onebit import reference
from onebit.comm import Single, run_threads


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("groups", [PLAIN, SGD_GROUPS])
@pytest.mark.parametrize("tau, max_norm", [(1, 5.0), (4, None), *more_of((1, None), (4, 5.0))])
def test_local_sgd_equals_its_reference(ranks, groups, tau, max_norm):
    """Each rank's own model and momentum, between averages too."""
    history = run_threads(
        ranks,
        lambda c: train_sgd(c, onebit.LocalSGD, groups, {"tau": tau, "max_grad_norm": max_norm}),
    )
    assert_equals_sgd_reference(
        history,
        reference.local_sgd(
            joined(start_values()),
            lambda t, x: np.stack([local_gradient(t, x[i], i) for i in range(ranks)]),
            ranks,
            tau=tau,
            **sgd_reference_options(groups),
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("groups", [PLAIN, SGD_GROUPS])
def test_local_sgd_that_averages_every_step_equals_sgd(groups):
    """All start from one x and m, and x - lr (momentum m + g_i) is linear in g_i."""
    local = run_threads(3, lambda c: train_sgd(c, onebit.LocalSGD, groups, {"tau": 1}))
    exact = run_threads(3, lambda c: train_sgd(c, onebit.DistributedSGD, groups))
    for a, b in zip(local[0], exact[0]):
        np.testing.assert_allclose(a["x"], b["x"], rtol=1e-11, atol=1e-12)
        if groups is SGD_GROUPS:
            np.testing.assert_allclose(a["m"], b["m"], rtol=1e-11, atol=1e-12)


def test_one_broken_gradient_counts_as_zero_in_a_local_step():
    """On its rank alone, which goes on by its momentum; the others do not notice."""

    def run(communicator, scale):
        run = make(communicator, onebit.LocalSGD, momentum=0.9, dampening=0.1, lr=0.1, tau=10)
        step(run, 0, communicator.rank)
        step(run, 1, communicator.rank, scale=scale if communicator.rank == 1 else 1.0)
        return everything(run), run.optimizer.last_step_skipped, run.optimizer.steps

    broken, zero = (
        run_threads(2, lambda c, scale=scale: run(c, scale)) for scale in (float("nan"), 0.0)
    )
    for ours, theirs in zip(broken, zero):
        assert same(ours[0], theirs[0]) and ours[1:] == theirs[1:] == (False, 2)


def local(communicator, steps, **options):
    run = make(communicator, onebit.LocalSGD, shapes=SMALL_SHAPES, momentum=0.9, lr=0.1, **options)
    for t in range(steps):
        step(run, t, communicator.rank)
    return run


def test_another_ranks_own_model_is_refused_with_the_remedy():
    states = run_threads(2, lambda c: saved(local(c, 6).optimizer))

    def load(communicator, size):
        for rank, state in enumerate(states):
            run = make(communicator, onebit.LocalSGD, shapes=SMALL_SHAPES)
            if (rank, 2) == (communicator.rank, size):
                run.optimizer.load_state_dict(state)
            else:
                with pytest.raises(ValueError, match="synchronize.*its own file"):
                    run.optimizer.load_state_dict(state)

    for size in (1, 2):
        run_threads(size, lambda c, size=size: load(c, size))


@pytest.mark.parametrize("size", [1, 3, *more(2)])
def test_a_synchronized_local_checkpoint_serves_any_number_of_ranks(size):
    """It holds the means of the models and of the momenta."""
    apart = run_threads(2, lambda c: everything(local(c, 6)))

    def together(communicator):
        run = local(communicator, 6)
        run.optimizer.synchronize()
        return everything(run), run.params, saved(run.optimizer)

    (ours, params, state), (theirs, _, _) = run_threads(2, together)
    assert same(ours, theirs)
    for a, b, mean in zip(*apart, ours):
        torch.testing.assert_close((a + b) / 2, mean)

    def load(communicator):
        run = resumed(communicator, params, state, kind=onebit.LocalSGD, momentum=0.9, lr=0.1)
        before = everything(run)
        step(run, 6, communicator.rank)
        step(run, 7, communicator.rank)
        return before, everything(run)

    results = run_threads(size, load)
    for before, after in results:
        assert same(before, ours) and same(after, results[0][1])


def test_what_no_rank_has_trained_keeps_its_bits():
    """(x + x + x) / 3 may differ from x: a frozen parameter is left out, one frozen since the
    last average is not, after a resume either.
    """

    def run(communicator):
        run = make(communicator, onebit.LocalSGD, shapes=((1000,), (1000,)), lr=0.1)
        run.params[0].requires_grad_(False)
        before = run.params[0].detach().clone()
        for t in range(2):
            step(run, t, communicator.rank)
        run.params[1].requires_grad_(False)
        other = make(communicator, onebit.LocalSGD, shapes=((1000,), (1000,)), lr=0.1)
        other.params[0].requires_grad_(False)
        other.params[1].requires_grad_(False).copy_(run.params[1])
        other.optimizer.load_state_dict(saved(run.optimizer))
        for each in (run, other):
            each.optimizer.synchronize()
        return before, run.params[0], other.params[0], run.params[1], other.params[1]

    results = run_threads(3, run)
    for before, frozen, also_frozen, trained, also_trained in results:
        assert torch.equal(before, frozen) and torch.equal(before, also_frozen)
        assert torch.equal(trained, results[0][3]) and torch.equal(also_trained, trained)


def test_compress_may_change_after_an_average_only():
    run = local(Single(), 6)
    run.optimizer.param_groups[0]["compress"] = False
    with pytest.raises(ValueError, match="synchronize"):
        step(run, 6, 0)
    run.optimizer.synchronize()
    step(run, 6, 0)
    assert run.optimizer.steps == 7


def test_ranks_with_another_tau_raise():
    def run(communicator):
        run = make(communicator, onebit.LocalSGD, tau=2 + communicator.rank)
        with pytest.raises(RuntimeError, match="tau=2.*tau=3"):
            step(run, 0, communicator.rank)

    run_threads(2, run)
