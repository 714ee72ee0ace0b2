"""No coordinate moves further under a frozen variance than Adam could move it."""

import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from helpers.cases import more
from helpers.lamb_runs import TENSORS
from helpers.reference_runs import (
    T_W,
    D,
    assert_equals_reference,
    gradients_of_all,
    joined,
    local_gradient,
    reference_options,
    segments,
    start_values,
    train,
)

import onebit
from onebit import reference
from onebit.comm import Single, run_threads
from onebit.optim.bounded_steps import largest_step

FROZEN = [
    (onebit.OneBitAdam, {"warmup": 60}),
    (onebit.ZeroOneAdam, {"variance_freeze_step": 60}),
    (onebit.OneBitLamb, {"warmup": 60}),
]


def test_adams_own_bound_by_hand():
    """0.1 / sqrt(0.001), and 1 where every gradient may be as large as the ones before."""
    assert largest_step(0.9, 0.999) == pytest.approx(3.1623, abs=1e-4)
    assert largest_step(0.9, 0.98) == 1


# ---- one outlier in one gradient


def largest_weight_after_an_outlier(kind, options, outlier):
    """Of 200 weights that are pulled to 0, on two ranks, of which one meets the outlier once."""

    def run(communicator):
        p = torch.nn.Parameter(torch.full((200,), 0.5))
        optimizer = kind([p], communicator=communicator, **options)
        for t in range(250):
            noise = torch.Generator().manual_seed(10 * t + communicator.rank)
            p.grad = p.detach() + 0.3 * torch.randn(200, generator=noise)
            if t == 100 and communicator.rank == 1:
                p.grad[3] = outlier
            optimizer.step()
        return p.detach().abs().max().item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_threads(2, run)[0]


@pytest.mark.report("B05")
@pytest.mark.parametrize("outlier", [1e10, *more(1e4, 1e6)])
@pytest.mark.parametrize("kind, options", FROZEN, ids=lambda x: getattr(x, "__name__", ""))
def test_an_outlier_leaves_the_largest_weight_near_adams(kind, options, outlier):
    baseline = onebit.Lamb if kind is onebit.OneBitLamb else onebit.DistributedAdam
    adams = largest_weight_after_an_outlier(baseline, {}, outlier)
    assert largest_weight_after_an_outlier(kind, options, outlier) < 1.5 * adams
    if kind is onebit.OneBitLamb and outlier < 1e6:
        return  # LAMB's own coefficient withstands it
    unbounded = options | {"bound_steps": False}
    assert largest_weight_after_an_outlier(kind, unbounded, outlier) > 2 * adams


def test_a_bounded_step_by_hand():
    """v = 1 at the freeze, then a gradient of 1e6: x moves by the bound, and all of it counts."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = onebit.OneBitAdam([p], lr=0.5, warmup=5, communicator=Single())
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.bounded_share == 0
    before, p.grad = p.detach().clone(), torch.full_like(p, 1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    torch.testing.assert_close(before - p.detach(), torch.full_like(before, 0.5 * 0.1 / 0.001**0.5))
    assert optimizer.bounded_share == 1


# ---- coordinates that get no real gradient


class Attention(torch.nn.Module):
    """One head over 8 tokens; queries, keys and values have one bias, as in torch's own layer.

    The keys' part changes nothing, so that its gradient is rounding, while the scale that one bit
    moves it by is that of the whole tensor.
    """

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 16)
        self.project = torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        query, key, value = self.project(x).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2) / 4).softmax(-1)
        return self.out(x + weights @ value)


def key_bias(kind, **options):
    """The largest, after training on made-up tokens whose successor is the token 3 later."""
    torch.manual_seed(0)
    model = Attention()
    with torch.no_grad():
        model.project.bias.zero_()
    optimizer = kind(
        model.parameters(), lr=3e-3, betas=(0.9, 0.98), communicator=Single(), **options
    )
    for t in range(150):
        tokens = torch.randint(16, (8, 8), generator=torch.Generator().manual_seed(t))
        loss = torch.nn.functional.cross_entropy(
            model(tokens).flatten(0, 1), ((tokens + 3) % 16).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.project.bias[16:32].detach().abs().max().item()


def test_key_biases_stay_where_adam_leaves_them():
    """The other biases of their tensor move by 0.1; without the bound the keys' ran to 160."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert key_bias(onebit.DistributedAdam) < 0.05
        assert key_bias(onebit.OneBitAdam, warmup=75) < 0.05
        assert key_bias(onebit.OneBitAdam, warmup=75, bound_steps=False) > 1


# ---- what the bound does and does not change


def spiked(t, x, rank):
    """`local_gradient`, with spikes on rank 0 after the freeze."""
    spikes = np.where(np.random.default_rng([t, 7]).random(D) < 0.05, 1e3, 1.0)
    return local_gradient(t, x, rank) * (spikes if rank == 0 and t > T_W else 1.0)


def without_weights(t, x, rank):
    """The same for every x, so that runs that move differently get the same gradients."""
    return spiked(t, np.zeros(D), rank)


REFERENCES = [
    (onebit.OneBitAdam, reference.one_bit_adam, {}, {}),
    (onebit.OneBitLamb, reference.one_bit_lamb, {"scale": "tensor"}, {"fused": False}),
]


@pytest.mark.parametrize("bound_steps", [True, *more(False)])
@pytest.mark.parametrize("kind, twin, own, of_twin", REFERENCES, ids=["Adam", "LAMB"])
def test_under_spikes_the_optimizer_equals_its_reference(kind, twin, own, of_twin, bound_steps):
    options = own | {"warmup": T_W, "bound_steps": bound_steps}

    def share(optimizer, params):
        return {"share": optimizer.bounded_share}

    history = run_threads(2, lambda c: train(c, kind, options, gradient=spiked, more=share))
    assert (max(state["share"] for state in history[0]) > 0.2) == bound_steps
    if twin is reference.one_bit_lamb:
        of_twin = of_twin | {"tensors": TENSORS}
    assert_equals_reference(
        history,
        twin(
            joined(start_values()),
            gradients_of_all(2, spiked),
            2,
            groups=segments(2),
            T_w=T_W,
            **of_twin,
            **reference_options(),
            bound_steps=bound_steps,
        ),
        corrected_at=T_W,
    )


@pytest.mark.parametrize("kind", [onebit.OneBitAdam, onebit.OneBitLamb])
def test_momentum_and_errors_are_the_same_with_and_without_the_bound(kind):
    """So the law that nothing is lost holds as before: only the parameters differ."""

    def history(bound_steps):
        options = {"warmup": T_W, "bound_steps": bound_steps}
        return run_threads(2, lambda c: train(c, kind, options, gradient=without_weights))[0]

    bounded, free = history(True), history(False)
    for one, other in islice(zip(bounded, free), T_W, None):
        for name in ("m", "v", "delta", "server_error"):
            np.testing.assert_array_equal(one[name], other[name])
    assert np.abs(bounded[-1]["x"] - free[-1]["x"]).max() > 0.1


def test_a_sync_moves_no_further_than_its_steps_could():
    """0/1 Adam: an outlier at a local step, and the sync after it, on both ranks."""

    def run(communicator):
        p = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
        optimizer = onebit.ZeroOneAdam(
            [p],
            lr=0.01,
            variance_freeze_step=2,
            local_step_scaler=4,
            local_step_clipper=4,
            communicator=communicator,
        )
        synced, steps, distances = p.detach().clone(), 0, []
        for t in range(60):
            p.grad = torch.ones_like(p) * (1e8 if t == 41 else 1.0)
            optimizer.step()
            steps += 1
            if optimizer._run.is_synced:
                distances.append((p.detach() - synced).abs().max().item() / (0.01 * steps))
                synced, steps = p.detach().clone(), 0
        return distances

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for distances in run_threads(2, run):
            assert max(distances) == pytest.approx(largest_step(0.9, 0.999), rel=0.02)


def test_the_bound_is_a_flag():
    p = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises((TypeError, ValueError), match="bound_steps"):
        onebit.OneBitAdam([p], warmup=3, bound_steps="yes", communicator=Single())


def test_masked_coordinates_do_not_move_and_are_not_bounded():
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = onebit.OneBitAdam([p], warmup=2, communicator=Single())
    for t in range(5):
        p.grad = torch.tensor([1.0, 1.0, 0.0, 0.0]) * (1e4 if t == 4 else 1.0)
        optimizer.step()
    assert p.isfinite().all() and not p[2:].any() and optimizer.bounded_share == 0.5
