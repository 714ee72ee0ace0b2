"""Adam with a variance that is averaged every tau steps, Figure 13 of "1-bit Adam"."""

import math

import numpy as np
import pytest
import torch
from helpers.cases import more
from helpers.reference_runs import (
    WORLD_SIZES,
    joined,
    local_gradient,
    reference_of,
    reference_options,
    segments,
    start_values,
    train,
)
from helpers.small_runs import everything, make, resumed, same, saved, step
from helpers.variance_runs import ODD_SHAPES, VARIANTS, assert_equals

import onebit
from onebit import LazyVarianceAdam, reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity, Sign
from onebit.layout import Layout, round_up


def gradients_at(ranks):
    """gradient(t, x) for an x that has a row for each rank."""
    return lambda t, x: np.stack([local_gradient(t, x[rank], rank) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("steps_with", ["own", "average"])
@pytest.mark.parametrize(
    "options",
    [
        {"tau": 3},
        *more({"tau": 5}, {"tau": 1}),
        {"tau": 4, "compressor": Identity, "bias_correction": False},
        {"max_grad_norm": 5.0},
    ],
    ids=str,
)
def test_adam_with_a_lazy_variance_equals_its_reference(ranks, steps_with, options, large_eps):
    history = run_threads(
        ranks, lambda c: train(c, LazyVarianceAdam, {"steps_with": steps_with, **options})
    )
    assert_equals(
        history,
        reference.lazy_variance_adam(
            joined(start_values()),
            gradients_at(ranks),
            ranks,
            groups=segments(ranks),
            tau=options.get("tau", 3),
            steps_with=steps_with,
            C=reference_of(options.get("compressor", Sign), ranks),
            bias_correction=options.get("bias_correction", True),
            max_norm=options.get("max_grad_norm"),
            **reference_options(),
        ),
    )


@pytest.mark.parametrize("steps_with", ["own", "average"])
def test_synchronize_averages_between_two_averages(steps_with):
    """The means of v_i, and of x_i, are what they were, and then the same everywhere.

    A second call changes no bit.
    """

    def run(communicator):
        run = make(
            communicator, LazyVarianceAdam, ODD_SHAPES, torch.float64, tau=4, steps_with=steps_with
        )
        for t in range(6):
            step(run, t, communicator.rank)
        before = (
            joined(run.params),
            joined([run.optimizer.state[p]["exp_avg_sq"] for p in run.params]),
        )
        run.optimizer.synchronize()
        once = everything(run)
        run.optimizer.synchronize()
        after = (
            joined(run.params),
            joined([run.optimizer.state[p]["exp_avg_sq"] for p in run.params]),
        )
        step(run, 6, communicator.rank)
        return before, after, once, same([p for p in run.params], once[: len(run.params)])

    results = run_threads(3, run)
    for i in range(2):
        mean = sum(result[0][i] for result in results) / 3
        for result in results:
            np.testing.assert_allclose(result[1][i], mean, rtol=1e-12, atol=1e-15)
    assert all(same(result[2], results[0][2]) for result in results) and not any(
        result[3] for result in results
    )


def test_the_step_after_an_average_starts_from_the_mean_of_the_parameters():
    """tau = 2, one coordinate, by hand: beta1 = beta2 = 0, so that m is the mean gradient and
    v_i is g_i^2.
    """

    def run(communicator):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = LazyVarianceAdam(
            [p],
            lr=1.0,
            betas=(0.0, 0.0),
            eps=0.0,
            tau=2,
            compressor=Identity,
            communicator=communicator,
        )
        found = []
        for gradients in ((1.0, 3.0), (2.0, 4.0)):
            p.grad = torch.tensor([gradients[communicator.rank]], dtype=torch.float64)
            optimizer.step()
            found.append(p.item())
        return found

    first = [-2 / 1, -2 / 3]
    second = sum(first) / 2 - 3 / math.sqrt((4 + 16) / 2)
    for rank, found in enumerate(run_threads(2, run)):
        assert found == pytest.approx([first[rank], second])


def exact_bytes(elements, ranks, itemsize=4):
    return 2 * (ranks - 1) * -(-elements // ranks) * itemsize


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("steps_with, vectors", [("own", 2), ("average", 1)])
def test_a_lazy_step_sends_one_bit_and_an_average_whole_vectors(ranks, steps_with, vectors):
    """16 bytes of agreement and the momentum at every step.

    Every tau steps, and at the first with "average", 4 bytes an element more.
    """

    def run(communicator):
        run = make(communicator, LazyVarianceAdam, ODD_SHAPES, tau=3, steps_with=steps_with)
        sent = []
        for t in range(7):
            step(run, t, communicator.rank)
            sent.append(
                (
                    run.optimizer.communication.last_step.bytes_sent,
                    run.optimizer.communication.last_step.calls,
                )
            )
        return sent

    layout = Layout(ODD_SHAPES, ranks)
    row = round_up(layout.chunk // 8 + 4 * layout.worker_partition().piece_lengths.shape[1], 16)
    for sent in run_threads(ranks, run):
        for t, (bytes_sent, calls) in enumerate(sent, 1):
            averages = vectors if t % 3 == 0 or t == 1 and steps_with == "average" else 0
            assert bytes_sent == (ranks - 1) * (16 + 2 * row) + averages * exact_bytes(
                layout.size, ranks
            )
            assert calls == (3 + 2 * averages if ranks > 1 else 0)


@pytest.mark.parametrize("options", [{"tau": 4}, {"tau": 4, "steps_with": "average"}], ids=str)
def test_a_synchronized_checkpoint_serves_any_number_of_ranks(options):
    def save(communicator):
        run = make(communicator, LazyVarianceAdam, ODD_SHAPES[:3], **options)
        for t in range(6):
            step(run, t, communicator.rank)
        run.optimizer.synchronize()
        return [p.detach().clone() for p in run.params], saved(run.optimizer)

    params, state = run_threads(2, save)[1]

    def load(communicator):
        run = resumed(communicator, params, state, kind=LazyVarianceAdam, **options)
        for t in range(6, 12):
            step(run, t, communicator.rank)
        return [p.detach() for p in run.params]

    for ranks in (1, 2, 3):
        results = run_threads(ranks, load)
        assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("reset_errors", [True, False])
@pytest.mark.parametrize("steps_with", ["own", "average"])
def test_another_ranks_checkpoint_between_averages_is_refused(reset_errors, steps_with):
    """reset_errors gives up errors, never a variance that is another rank's.

    After an average it is everybody's.
    """

    def save(communicator, steps):
        run = make(communicator, LazyVarianceAdam, tau=4, steps_with=steps_with)
        for t in range(steps):
            step(run, t, communicator.rank)
        return saved(run.optimizer)

    def load(state):
        other = make(Single(), LazyVarianceAdam, tau=4, steps_with=steps_with)
        other.optimizer.load_state_dict(state, reset_errors=reset_errors)

    with pytest.raises(ValueError, match="synchronize"):
        load(run_threads(2, lambda c: save(c, 6))[1])
    if reset_errors:
        with pytest.warns(UserWarning, match="is lost"):
            load(run_threads(2, lambda c: save(c, 8))[1])


def test_a_checkpoint_of_plain_adam_goes_on_with_its_variance():
    """steps_with="average" has no average in it: the first step after the load makes one,
    instead of dividing by eps.
    """
    adam = make(Single(), onebit.DistributedAdam, ODD_SHAPES, lr=1e-3)
    for t in range(5):
        step(adam, t, 0)
    params = [p.detach().clone() for p in adam.params]
    for kind, options in VARIANTS[1:]:
        other = make(Single(), kind, ODD_SHAPES, lr=1e-3, compressor=Identity, **options)
        with torch.no_grad():
            for p, value in zip(other.params, params):
                p.copy_(value)
        other.optimizer.load_state_dict(saved(adam.optimizer))
        step(other, 5, 0)
        assert (
            max(
                float((p.detach() - value).abs().max())
                for p, value in zip(other.params, params)
                if p.numel()
            )
            < 1e-2
        )


@pytest.mark.parametrize("steps_with", ["own", "average"])
def test_lazy_variance_leaves_coordinates_alone_where_it_knows_no_variance(steps_with):
    def run(communicator):
        own = make(communicator, onebit.LazyVarianceAdam, shapes=((100,),), steps_with=steps_with)
        x = own.params[0].detach().clone()
        for t in range(9):
            own.params[0].grad = torch.randn(
                100, generator=torch.Generator().manual_seed(10 * t + communicator.rank)
            )
            own.params[0].grad[: 20 - 10 * communicator.rank] = 0
            own.optimizer.step()
        return float((own.params[0].detach() - x).abs().max())

    assert max(run_threads(2, run)) < 1


def test_lazy_variance_leaves_a_frozen_parameter_its_bits():
    def run(communicator):
        own = make(communicator, onebit.LazyVarianceAdam, shapes=((500,), (20,)))
        own.params[0].requires_grad_(False)
        before = own.params[0].detach().clone()
        for t in range(10):
            own.params[1].grad = torch.randn(
                20, generator=torch.Generator().manual_seed(10 * t + communicator.rank)
            )
            own.optimizer.step()
        return torch.equal(before, own.params[0])

    assert all(run_threads(3, run))
