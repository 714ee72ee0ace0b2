"""Coordinates whose variance is zero or next to nothing at the freeze."""

import warnings

import pytest
import torch

import onebit
from onebit.comm import Single, run_threads


def masked_run(communicator, steps, late_from=10**9, **options):
    """32 coordinates pulled to 1; the second half has no gradient before step `late_from`."""
    p = torch.nn.Parameter(torch.zeros(32))
    optimizer = onebit.OneBitAdam(
        [p], lr=1e-2, betas=(0.9, 0.9), warmup=20, communicator=communicator, **options
    )
    for t in range(steps):
        p.grad = (p.detach() - 1) + 0.01 * torch.randn(
            32, generator=torch.Generator().manual_seed(100 * t + communicator.rank)
        )
        if t < late_from:
            p.grad[16:] = 0
        yield t, p, optimizer
        optimizer.step()


@pytest.mark.report("R07")
def test_coordinates_without_variance_keep_their_value_exactly():
    def run(communicator):
        for _, p, optimizer in masked_run(communicator, 200):
            pass
        return p.detach()

    for x in run_threads(2, run):
        assert not x[16:].any() and (x[:16] - 1).abs().max() < 0.2


@pytest.mark.report("R07")
def test_late_gradients_are_warned_of_and_harmless():
    with pytest.warns(UserWarning, match="do not train") as caught:
        for _, p, _ in masked_run(Single(), 60, late_from=25):
            pass
    assert sum("do not train" in str(w.message) for w in caught) == 1
    assert not p[16:].any() and torch.isfinite(p).all()


def test_a_variance_floor_lets_late_coordinates_train():
    for _, p, _ in masked_run(Single(), 400, late_from=25, variance_floor=0.1):
        pass
    assert (p.detach() - 1).abs().max() < 0.3


def test_a_new_warmup_lets_late_coordinates_train():
    for t, p, optimizer in masked_run(Single(), 400, late_from=25):
        if t == 30:
            optimizer.restart_warmup(30)
    assert (p.detach() - 1).abs().max() < 0.3


@pytest.mark.report("R10")
def test_weight_decay_holds_in_the_compressed_phase_and_on_masked_coordinates():
    """Decoupled: x shrinks by (1 - lr wd) a step. 400 compressed steps with lr 1e-2, wd 0.1: (1
    - 1e-3)^400 = 0.670.
    """

    def run(communicator):
        p = torch.nn.Parameter(torch.ones(500))
        optimizer = onebit.OneBitAdam(
            [p], lr=1e-2, betas=(0.9, 0.9), weight_decay=0.1, warmup=30, communicator=communicator
        )
        generator = torch.Generator().manual_seed(communicator.rank)
        for t in range(430):
            p.grad = torch.randn(500, generator=generator) * 1e-3
            p.grad[400:] = 0
            if t == 30:
                for q, v in ((p, 1.0), (optimizer.state[p]["exp_avg"], 0.0)):
                    q.data.fill_(v)
                optimizer.state[p]["exp_avg_sq"][:400] = 1e-2  # so that only decay moves x
            optimizer.step()
        return p.detach()

    for x in run_threads(2, run):
        assert x[:400].mean().item() == pytest.approx(0.670, abs=3e-3)
        torch.testing.assert_close(x[400:], torch.full((100,), 0.999**400), rtol=1e-4, atol=0)


def test_a_tiny_variance_is_warned_of_and_a_floor_or_the_bound_cures_it():
    """A rare word's coordinate: one gradient early on, so that v is not zero at the freeze but
    next to nothing.
    """

    def train(**options):
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = onebit.OneBitAdam(
            [p], lr=1e-2, warmup=200, betas=(0.9, 0.9), communicator=Single(), **options
        )
        generator = torch.Generator().manual_seed(0)
        for t in range(300):
            p.grad = torch.randn(64, generator=generator)
            if t:
                p.grad[:2] = 0
            optimizer.step()
        return p.detach().abs().max()

    named = r"2 coordinates, 2 of them in param_groups\[0\]\['params'\]\[0\], .* variance_floor"
    with pytest.warns(UserWarning, match=named):
        assert train(bound_steps=False) > 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*variance_floor")
        assert train(bound_steps=False, variance_floor=1e-3) < 1
        assert train() <= 1
