"""Adam with a compressed or a late variance, Figures 12 and 13 of "1-bit Adam": each equals its reference, and Adam where nothing is lost."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from test_behaviour import everything, make, same, step
from test_checkpoint import resumed, saved
from test_compressors import reference_of
from test_optimizers import (
    GROUPS,
    SHAPES,
    STEPS,
    WORLD_SIZES,
    gradients_of_all,
    joined,
    local_gradient,
    reference_options,
    segments,
    server_error,
    split,
    start_values,
    train,
)

import onebit
from onebit import LazyVarianceAdam, QuantizedVarianceAdam, reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity, Quantize, Sign
from onebit.layout import Layout

QSGD = {bits: partial(Quantize, bits=bits, norm="l2", stochastic=True) for bits in (4, 8, 16)}
ODD_SHAPES = ((70,), (9, 15), (0, 4), (), (257, 3))


@pytest.fixture
def large_eps(monkeypatch):
    """Where the variance is 0, or has been rounded to it, x moves by m / eps: with the small eps of `GROUPS` it would reach 1e8."""
    monkeypatch.setattr("test_optimizers.GROUPS", [dict(group, eps=0.1) for group in GROUPS])


def assert_equals(history, generator):
    """As `test_optimizers.assert_equals_reference`, for a reference whose x and v may have a row for each rank."""
    ranks = len(history)
    for t, expected in zip(range(len(history[0])), generator):
        for rank in range(ranks):
            own = {"x": expected.x, "v": expected.v, "m": expected.m, "delta": expected.delta[rank]}
            for name, value in own.items():
                value = value[rank] if name in "xv" and value.ndim == 2 else value
                np.testing.assert_allclose(
                    history[rank][t][name],
                    value,
                    rtol=1e-9,
                    atol=1e-12,
                    err_msg=f"{name}, step {t + 1}, rank {rank}",
                )
        np.testing.assert_allclose(
            server_error(history, t, ranks), expected.delta_bar, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"variance_compressor": QSGD[4]},
        {"variance_compressor": QSGD[8]},
        {"variance_compressor": QSGD[16]},
        {},
        {
            "variance_compressor": QSGD[8],
            "compressor": partial(Quantize, bits=4, stochastic=True, seed=3),
        },
        {
            "variance_compressor": partial(Quantize, bits=8),
            "bias_correction": False,
            "max_grad_norm": 5.0,
        },
        {"variance_compressor": Identity, "compressor": Identity},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_adam_with_a_quantized_variance_equals_its_reference(ranks, options, large_eps):
    """The random draws of step t are those of round t - 1; the variance's come from stream 1, the momentum's from stream 0."""
    history = run_threads(ranks, lambda c: train(c, QuantizedVarianceAdam, options))
    told = {
        "bias_correction": options.get("bias_correction", True),
        "max_norm": options.get("max_grad_norm"),
    }
    assert_equals(
        history,
        reference.quantized_variance_adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            Q=reference_of(options.get("variance_compressor", QSGD[8]), ranks, stream=1),
            C=reference_of(options.get("compressor", Sign), ranks),
            **reference_options(),
            **told,
        ),
    )


def gradients_at(ranks):
    """gradient(t, x) for an x that has a row for each rank."""
    return lambda t, x: np.stack([local_gradient(t, x[rank], rank) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("steps_with", ["own", "average"])
@pytest.mark.parametrize(
    "options",
    [
        {"tau": 3},
        {"tau": 5},
        {"tau": 1},
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


# ---- identities


def adam_on_mean_squares(ranks):
    """x after each step of Adam whose variance takes in mean_i g_i^2 instead of (mean_i g_i)^2."""
    told = reference_options()
    x = joined(start_values())
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, STEPS + 1):
        g = gradients_of_all(ranks)(t, x)
        m = told["beta1"] * m + (1 - told["beta1"]) * g.mean(0)
        v = told["beta2"] * v + (1 - told["beta2"]) * (g * g).mean(0)
        m_hat, v_hat = m / (1 - told["beta1"] ** t), v / (1 - told["beta2"] ** t)
        x = x - told["gamma"](t) * (
            told["weight_decay"] * x + m_hat / (np.sqrt(v_hat) + told["eta"])
        )
        yield x


LOSSLESS = [
    (QuantizedVarianceAdam, {"compressor": Identity, "variance_compressor": Identity}),
    (LazyVarianceAdam, {"compressor": Identity, "tau": 1}),
    (LazyVarianceAdam, {"compressor": Identity, "tau": 1, "steps_with": "average"}),
]


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("kind, options", LOSSLESS)
def test_without_loss_it_is_adam_on_the_mean_of_the_squared_gradients(ranks, kind, options):
    """Identity sends everything, tau = 1 averages at every step: what is left of both is where the square is taken."""
    history = run_threads(ranks, lambda c: train(c, kind, options))
    for t, expected in enumerate(adam_on_mean_squares(ranks)):
        for own in history:
            np.testing.assert_allclose(
                own[t]["x"], expected, rtol=1e-9, atol=1e-12, err_msg=f"step {t + 1}"
            )


@pytest.mark.parametrize(
    "kind, options", [*LOSSLESS, (LazyVarianceAdam, {"compressor": Identity, "tau": 7})]
)
def test_with_one_worker_and_without_loss_it_is_adam(kind, options):
    """The mean of one square is the square of the mean, and there is nobody to wait for."""
    history, adam = (
        run_threads(1, lambda c: train(c, *which))[0]  # noqa: B023
        for which in ((kind, options), (onebit.DistributedAdam, {}))
    )
    for ours, theirs in zip(history, adam, strict=True):
        for name in "xmv":
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-13)


def test_16_bits_follow_adam_and_4_bits_do_not():
    """What Figure 12 shows: few bits round most of a tensor's variance to zero, and x moves by m / eps there."""

    def distance(bits):
        options = {"compressor": Identity, "variance_compressor": QSGD[bits]}
        history = run_threads(2, lambda c: train(c, QuantizedVarianceAdam, options))[0]
        return max(
            np.abs(ours["x"] - exact).max() for ours, exact in zip(history, adam_on_mean_squares(2))
        )

    moved = max(np.abs(x - joined(start_values())).max() for x in adam_on_mean_squares(2))
    assert distance(16) < moved < 1e-3 * distance(4)


# ---- what the ranks have in common, and what not


def bits_of(values):
    return [v.numpy().tobytes() if torch.is_tensor(v) else v.tobytes() for v in values]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "kind, options, ours",
    [
        (QuantizedVarianceAdam, {}, lambda t: "xmv"),
        (LazyVarianceAdam, {"tau": 3}, lambda t: "xmv" if t % 3 == 0 else "m"),
        (
            LazyVarianceAdam,
            {"tau": 3, "steps_with": "average"},
            lambda t: "xmv" if t % 3 == 0 else "xm",
        ),
    ],
)
def test_ranks_hold_the_same_bits_after_an_average_and_differ_where_they_may(
    ranks, kind, options, ours
):
    history = run_threads(ranks, lambda c: train(c, kind, options, 12, torch.float32))
    for t, states in enumerate(zip(*history), 1):
        for name in "xmv":
            assert (len(set(bits_of(state[name] for state in states))) == 1) == (name in ours(t)), (
                t,
                name,
            )


@pytest.mark.parametrize("steps_with", ["own", "average"])
def test_synchronize_averages_between_two_averages(steps_with):
    """The means of v_i, and of x_i, are what they were, and then the same everywhere; a second call changes no bit."""

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
    """tau = 2, one coordinate, by hand: beta1 = beta2 = 0, so that m is the mean gradient and v_i is g_i^2."""

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


# ---- bytes


def exact_bytes(elements, ranks, itemsize=4):
    return 2 * (ranks - 1) * -(-elements // ranks) * itemsize


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_step_with_a_quantized_variance_sends_one_and_n_bits(ranks, bits):
    """16 bytes of agreement, then rows of 1/8 and n/8 bytes an element and a scale for each piece, there and back: 5 calls."""

    def run(communicator):
        run = make(communicator, QuantizedVarianceAdam, ODD_SHAPES, variance_compressor=QSGD[bits])
        step(run, 0, communicator.rank)
        return run.optimizer.communication.last_step

    layout = Layout(ODD_SHAPES, ranks)
    pieces = layout.worker_partition().piece_lengths.shape[1]
    rows = layout.chunk // 8 + layout.chunk * bits // 8 + 2 * 4 * pieces
    for last in run_threads(ranks, run):
        assert last.bytes_sent == last.bytes_received == (ranks - 1) * (16 + 2 * rows)
        assert last.calls == (5 if ranks > 1 else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("steps_with, vectors", [("own", 2), ("average", 1)])
def test_a_lazy_step_sends_one_bit_and_an_average_whole_vectors(ranks, steps_with, vectors):
    """16 bytes of agreement and the momentum at every step; every tau steps, and at the first with "average", 4 bytes an element more."""

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
    row = layout.chunk // 8 + 4 * layout.worker_partition().piece_lengths.shape[1]
    for sent in run_threads(ranks, run):
        for t, (bytes_sent, calls) in enumerate(sent, 1):
            averages = vectors if t % 3 == 0 or t == 1 and steps_with == "average" else 0
            assert bytes_sent == (ranks - 1) * (16 + 2 * row) + averages * exact_bytes(
                layout.size, ranks
            )
            assert calls == (3 + 2 * averages if ranks > 1 else 0)


# ---- checkpoints


VARIANTS = [
    (QuantizedVarianceAdam, {}),
    (LazyVarianceAdam, {"tau": 4}),
    (LazyVarianceAdam, {"tau": 4, "steps_with": "average"}),
]


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

    for ranks in WORLD_SIZES:
        results = run_threads(ranks, load)
        assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("reset_errors", [True, False])
@pytest.mark.parametrize("steps_with", ["own", "average"])
def test_another_ranks_checkpoint_between_averages_is_refused(reset_errors, steps_with):
    """reset_errors gives up errors, never a variance that is another rank's; after an average it is everybody's."""

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
    """steps_with="average" has no average in it: the first step after the load makes one, instead of dividing by eps."""
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


# ---- the rest of the family's habits


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_an_uncompressed_group_stays_plain_adam_and_overlap_changes_no_bit(kind, options):
    """compress=False is averaged exactly, variance and all, at every step."""

    def run(communicator, kind, flag, **options):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind(
            [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:], **flag)],
            communicator=communicator,
            **options,
        )
        for t in range(1, 12):
            loss = sum(
                (p * torch.tensor(g, dtype=torch.float32)).sum()
                for p, g in zip(
                    params,
                    split(
                        local_gradient(t, np.zeros(sum(map(math.prod, SHAPES))), communicator.rank)
                    ),
                )
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return joined(params[3:]), joined(params)

    plain = run_threads(3, lambda c: run(c, onebit.DistributedAdam, {}))
    late = run_threads(
        3, lambda c: run(c, kind, {"compress": False}, bucket_cap_mb=5e-4, **options)
    )
    early = run_threads(
        3, lambda c: run(c, kind, {"compress": False}, bucket_cap_mb=5e-4, overlap=True, **options)
    )
    for adam, one, other in zip(plain, late, early):
        np.testing.assert_array_equal(one[0], adam[0])
        np.testing.assert_array_equal(one[1], other[1])
        assert not np.array_equal(one[1], adam[1])


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_a_gradient_that_is_not_finite_makes_all_ranks_skip_and_changes_nothing(kind, options):
    def run(communicator):
        run = make(communicator, kind, ODD_SHAPES, **options)
        for t in range(3):
            step(run, t, communicator.rank)
        before = everything(run)
        step(run, 3, communicator.rank, scale=math.nan if communicator.rank == 1 else 1.0)
        unchanged = same(before, everything(run)) and run.optimizer.last_step_skipped
        step(run, 3, communicator.rank)
        return unchanged, run.optimizer.steps, not same(before, everything(run))

    assert run_threads(2, run) == [(True, 4, True)] * 2


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (LazyVarianceAdam, {"tau": 0}, ValueError, "tau.*at least 1"),
        (LazyVarianceAdam, {"tau": 2.5}, ValueError, "whole number"),
        (LazyVarianceAdam, {"steps_with": "mine"}, ValueError, "steps_with must be one of"),
        (LazyVarianceAdam, {"taus": 3}, TypeError, "'tau'"),
        (
            QuantizedVarianceAdam,
            {"variance_compressor": 8},
            TypeError,
            "variance_compressor must be",
        ),
        (
            QuantizedVarianceAdam,
            {"variance_compresor": Identity},
            TypeError,
            "'variance_compressor'",
        ),
        (
            QuantizedVarianceAdam,
            {"compressor": partial(Quantize, bits=3)},
            ValueError,
            "bits among",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(kind, options, error, message):
    with pytest.raises(error, match=message):
        make(Single(), kind, **options)


@pytest.mark.parametrize(
    "kind, theirs",
    [
        (LazyVarianceAdam, {"tau": 5}),
        (LazyVarianceAdam, {"steps_with": "average"}),
        (QuantizedVarianceAdam, {"variance_compressor": QSGD[16]}),
        (QuantizedVarianceAdam, {"compressor": Identity}),
    ],
)
def test_ranks_with_other_options_raise_at_the_first_step(kind, theirs):
    def run(communicator):
        run = make(communicator, kind, **(theirs if communicator.rank else {}))
        with pytest.raises(RuntimeError, match="the ranks differ"):
            step(run, 0, communicator.rank)
        return True

    assert run_threads(2, run) == [True, True]


def test_the_random_draws_of_a_resumed_run_go_on():
    """The second half of a run that was saved makes the second half's random draws; with those of the first it would end elsewhere."""

    def run(communicator):
        straight = make(
            communicator, QuantizedVarianceAdam, ODD_SHAPES[:3], variance_compressor=QSGD[4]
        )
        for t in range(10):
            step(straight, t, communicator.rank)
            if t == 4:
                params, state = (
                    [p.detach().clone() for p in straight.params],
                    saved(straight.optimizer),
                )
        ends = [everything(straight)]
        for rounds in (None, 0):
            other = resumed(
                communicator, params, state, kind=QuantizedVarianceAdam, variance_compressor=QSGD[4]
            )
            if rounds is not None:
                for allreduce in other.optimizer._variance_allreduces.values():
                    allreduce.rounds = rounds
            for t in range(5, 10):
                step(other, t, communicator.rank)
            ends.append(everything(other))
        return same(ends[0], ends[1]), same(ends[0], ends[2])

    assert run_threads(2, run) == [(True, False)] * 2


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
