"""1-bit LAMB's ratio, coefficients and momentum scaling, with masked coordinates and zeros too."""

import math

import numpy as np
import pytest
import torch
from helpers.cases import holds_for_each
from helpers.lamb_runs import numbers
from helpers.reference_runs import WORLD_SIZES
from helpers.small_runs import make, same, step

import onebit
from onebit.comm import Single, run_threads
from onebit.compression import Identity
from onebit.optim.onebit_lamb import next_ratio, scaling_coefficients


@holds_for_each(
    [
        (1.05, 1.0, 1.05),  # near enough
        (3.0, 1.0, 1.1),  # kept near the last one
        (0.1, 1.0, 0.9),
        (9.0, 3.9, 4.0),  # the bounds come last
        (0.1, 0.51, 0.5),
        (math.inf, 2.0, 2.2),  # v_fresh = 0
        (-math.inf, 1.0, 1.0),  # a tensor without active elements
    ]
)
def test_the_ratio_is_clipped_around_the_last_one_and_then_to_its_bounds(largest, last, expected):
    assert next_ratio(largest, last, 0.1, (0.5, 4.0)) == pytest.approx(expected, rel=1e-12)
    assert next_ratio(largest, 1.0, 0.1, (2.0, 4.0)) == (
        1.0 if largest == -math.inf else 2.0
    )  # the bounds hold from the first step on


@pytest.mark.parametrize(
    "factor, expected",
    [
        (0.0, [min(1.1**k, 4.0) for k in range(1, 31)]),
        (10.0, [max(0.9**k, 0.5) for k in range(1, 31)]),
    ],
)
def test_the_ratio_follows_the_fresh_variance_and_the_coefficient_the_ratio(factor, expected):
    """v_fresh falls by beta2 = 0.85 a step without gradient, so that 1 / beta2 > 1.1 and r
    grows by r_threshold; it falls if gradients grow.
    """
    run = make(Single(), onebit.OneBitLamb, warmup=12, betas=(0.0, 0.85), compressor=Identity)
    ratios, coefficients = [], []
    for t in range(42):
        for p in run.params:
            p.grad = torch.full(p.shape, factor if t >= 12 else 1.0)
        run.optimizer.step()
        ratios.append(numbers(run, "ratio"))
        coefficients.append(numbers(run, "coefficient"))
        if t == 11:
            averages = numbers(run, "coefficient_average")
    np.testing.assert_allclose(ratios[12:], [[r] * 2 for r in expected], rtol=1e-12)
    np.testing.assert_allclose(
        coefficients[12:], [[r * c for c in averages] for r in expected], rtol=1e-12
    )
    assert ratios[:12] == [[1.0, 1.0]] * 12 and numbers(run, "coefficient_average") == averages


def test_the_average_coefficient_is_that_of_the_warmup():
    """c_avg <- beta3 c_avg + (1 - beta3) c, from 0: recomputed from the coefficients that the
    optimizer shows.
    """
    run, average = (
        make(
            Single(),
            onebit.OneBitLamb,
            warmup=15,
            coefficient_bounds=(1e-3, 50.0),
            coefficient_beta=0.8,
        ),
        np.zeros(2),
    )
    for t in range(15):
        step(run, t, 0)
        average = 0.8 * average + 0.2 * np.array(numbers(run, "coefficient"))
        np.testing.assert_allclose(numbers(run, "coefficient_average"), average, rtol=1e-12)
    assert len({*average}) == 2


def test_scaling_is_the_mean_momentum_scale_over_the_tensors_own():
    assert scaling_coefficients([1.0, 3.0, 0.0]) == [2.0, pytest.approx(2 / 3), 1.0]
    assert scaling_coefficients([0.0, 0.0]) == [1.0, 1.0]


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_momentum_scaling_keeps_small_tensors_apart_from_large_ones(scale):
    """Gradients of 1e-4 beside 10: the first compressed momentum has each tensor's own size.

    Fused, one scale travels, so that scaling times |m| is the same number everywhere.
    """
    run = make(Single(), onebit.OneBitLamb, shapes=((300,), (200,)), warmup=20, scale=scale)
    for t in range(21):
        generator = torch.Generator().manual_seed(t)
        for p, size in zip(run.params, (1e-4, 10.0)):
            p.grad = size * (1 + 0.1 * torch.randn(p.shape, generator=generator))
        run.optimizer.step()
    momenta = [run.optimizer.state[p]["exp_avg"].abs() for p in run.params]
    assert [float(m.mean()) for m in momenta] == pytest.approx(
        [1e-4 * (1 - 0.9**21), 10 * (1 - 0.9**21)], rel=0.05
    )
    scaled = torch.cat([m * s for m, s in zip(momenta, numbers(run, "scaling"))])
    if scale == "fused":
        torch.testing.assert_close(scaled, scaled[:1].expand(500), rtol=1e-6, atol=0)
        assert (
            len(run.optimizer._run.buckets[0].allreduce.compressor.partition.piece_lengths[0]) == 1
        )  # one scale
    else:
        assert numbers(run, "scaling") == [1.0, 1.0]


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("scale", ["tensor", "fused"])
@pytest.mark.parametrize("ratio_of", ["variance", "root"])
def test_coordinates_without_gradient_change_nothing_for_the_others(ranks, scale, ratio_of):
    """Each tensor with as many zeros again, which never get a gradient: norms, scales, scaling
    and ratios are those of the half that lives.
    """

    def run(communicator, dead):
        params = [
            torch.nn.Parameter(torch.cat([value * torch.ones(64), torch.zeros(dead)]))
            for value in (1.0, -0.1)
        ]
        optimizer = onebit.OneBitLamb(
            params,
            lr=1e-2,
            betas=(0.9, 0.9),
            eps=0.0 if ratio_of == "variance" else 1e-8,
            warmup=15,
            scale=scale,
            ratio_of=ratio_of,
            ratio_bounds=(1e-3, 1e3),
            communicator=communicator,
        )
        for t in range(40):
            generator = torch.Generator().manual_seed(100 * t + communicator.rank)
            for p, size in zip(params, (1.0, 1e-3)):
                p.grad = torch.cat([size * torch.randn(64, generator=generator), torch.zeros(dead)])
            optimizer.step()
        (part,) = optimizer._run.buckets
        assert not any(p[64:].any() for p in params)
        return [p[:64].detach() for p in params] + [part.coefficient, part.ratio, part.scaling]

    plain = run_threads(ranks, lambda c: run(c, 0))
    with_zeros = run_threads(ranks, lambda c: run(c, 64))
    for rank in range(ranks):
        assert same(plain[rank], with_zeros[rank]) and same(plain[rank], plain[0])
        assert len({*plain[rank][3].tolist()}) == 2


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_tensors_without_momentum_or_without_gradient_stay_finite(scale):
    """At the freeze tensor 0 has momentum, tensor 1 has none but a variance (beta1 = 0, and no
    gradient at step T_w), tensor 2 has neither.
    """
    params = [torch.nn.Parameter(torch.ones(40)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:], "betas": (0.0, 0.9)}]
    optimizer = onebit.OneBitLamb(groups, lr=1e-2, warmup=12, scale=scale, communicator=Single())
    for t in range(1, 31):
        for p, g in zip(params, (1.0, float(t != 12), 0.0)):
            p.grad = torch.full((40,), g)
        optimizer.step()
        if t == 12:
            assert (
                float(optimizer.state[params[1]]["scaling"])
                == float(optimizer.state[params[2]]["scaling"])
                == 1.0
            )
            at_freeze = [p.detach().clone() for p in params]
    assert (
        all(torch.isfinite(p).all() for p in params)
        and float(optimizer.state[params[2]]["ratio"]) == 1.0
    )
    moved = [float((p.detach() - before).abs().max()) for p, before in zip(params, at_freeze)]
    assert moved[0] > 1e-3 and moved[1] > 1e-3 and moved[2] == 0


def test_masked_coordinates_take_no_part_in_scaling_even_if_they_have_momentum():
    """beta2 = 0, so that v is the last gradient's square: 0 for half of tensor 1, whose
    momentum is still there.
    """
    params = [torch.nn.Parameter(torch.ones(40)) for _ in range(2)]
    optimizer = onebit.OneBitLamb(
        params, betas=(0.5, 0.0), warmup=12, scale="fused", communicator=Single()
    )
    for t in range(1, 13):
        params[0].grad, params[1].grad = torch.full((40,), 3.0), torch.ones(40)
        if t == 12:
            params[1].grad[20:] = 0
        optimizer.step()
    assert optimizer.state[params[1]]["exp_avg"][20:].all()
    scaling = [float(optimizer.state[p]["scaling"]) for p in params]
    assert scaling == pytest.approx([2 / 3, 2.0], rel=1e-6)  # own scales 3 and 1, times 1 - 0.5^12


@pytest.mark.parametrize(
    "warmup, beta, warns", [(9, 0.9, True), (10, 0.9, False), (1, 0.0, False), (3, 0.8, True)]
)
def test_a_warmup_shorter_than_the_averages_memory_is_warned_of(warmup, beta, warns, recwarn):
    run = make(Single(), onebit.OneBitLamb, warmup=warmup, coefficient_beta=beta)
    for t in range(warmup):
        step(run, t, 0)
    for t in range(12):  # the compressed steps add nothing to the average
        step(run, t, 0)
    run.optimizer.restart_warmup(1)
    step(run, 0, 0)
    expected = warns + (warmup + 1 < 1 / (1 - beta) - 1e-9)
    assert sum("smaller coefficient_beta" in str(w.message) for w in recwarn) == expected


def test_a_group_that_changes_compress_in_the_warmup_keeps_its_coefficients():
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = onebit.OneBitLamb(
        [{"params": [params[0]]}, {"params": [params[1]], "compress": False}],
        warmup=20,
        communicator=Single(),
    )
    for t in range(25):
        optimizer.param_groups[1]["compress"] = t > 10
        before = float(optimizer.state[params[1]]["coefficient_average"])
        for p in params:
            p.grad = torch.ones(8)
        optimizer.step()
        assert float(optimizer.state[params[1]]["coefficient_average"]) >= before
    assert optimizer.state[params[1]]["worker_error"] is not None
