"""LAMB and 1-bit LAMB equal their references, become Adam and 1-bit Adam at the right options, and lose nothing between phases."""

import math
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from test_behaviour import P, everything, make, same, step
from test_checkpoint import saved
from test_optimizers import (
    GROUPS,
    OFFSETS,
    SHAPES,
    T_W,
    WORLD_SIZES,
    D,
    assert_equals_reference,
    gradients_of_all,
    joined,
    local_gradient,
    reference_options,
    segments,
    split,
    start_values,
    train,
)

import onebit
from onebit import reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity, Quantize
from onebit.layout import Layout
from onebit.optim.onebit_lamb import next_ratio, scaling_coefficients

TENSORS = [slice(a, b) for a, b in zip(OFFSETS, OFFSETS[1:])]
NUMBERS = {"c": "coefficient", "c_avg": "coefficient_average", "r": "ratio", "scaling": "scaling"}
BOUNDS = (0.1, 2.0)  # wide enough for some tensors to lie inside


def more(optimizer, params):
    """The state that LAMB has beside Adam's."""
    state = optimizer.state
    found = {
        letter: np.array([float(state[p][name]) for p in params])
        for letter, name in NUMBERS.items()
        if name in state[params[0]]
    }
    return found | (
        {"v_fresh": joined([state[p]["exp_avg_sq_fresh"] for p in params])}
        if "exp_avg_sq_fresh" in state[params[0]]
        else {}
    )


def fused_segments(ranks):
    """One scale for everything a worker sends, and one for each server's chunk, as slices of the unpadded vector."""
    layout = Layout(SHAPES, ranks)
    real = torch.zeros(layout.size + 1, dtype=torch.int64)
    real[1:] = layout.real.cumsum(0)
    edges = [int(real[chunk]) for chunk in range(0, layout.size + 1, layout.chunk)]
    return [slice(0, D)], [slice(a, b) for a, b in zip(edges, edges[1:])]


def assert_all_equal_reference(history, generator, frozen_at=None):
    """`assert_equals_reference`, and LAMB's own state; v and v_fresh take over at the end of step T_w here, after it in the reference."""
    expected = list(islice(generator, len(history[0])))
    assert_equals_reference(history, expected, corrected_at=frozen_at)
    for steps in history:
        for t, (state, letters) in enumerate(zip(steps, expected), start=1):
            for name in set(state) & {"c", "c_avg", "r", "scaling", "v_fresh"} - (
                {"scaling", "v_fresh"} if t == frozen_at else set()
            ):
                np.testing.assert_allclose(
                    state[name],
                    getattr(letters, name),
                    rtol=1e-9,
                    atol=1e-12,
                    err_msg=f"{name} of step {t}",
                )


# ---- the references


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_lamb_equals_its_reference(ranks, bias_correction, max_norm):
    options = {
        "bias_correction": bias_correction,
        "max_grad_norm": max_norm,
        "coefficient_bounds": BOUNDS,
    }
    history = run_threads(ranks, lambda c: train(c, onebit.Lamb, options, more=more))
    assert len({*history[0][-1]["c"]}) > 3  # not all at the bounds
    assert_all_equal_reference(
        history,
        reference.lamb(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            tensors=TENSORS,
            c_bounds=BOUNDS,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "scale, ratio_of, compressor, C",
    [
        ("tensor", "variance", None, reference.one_bit),
        ("tensor", "root", Identity, reference.identity),
        ("fused", "variance", None, reference.one_bit),
        ("fused", "root", None, reference.one_bit),
        ("fused", "variance", Identity, reference.identity),
    ],
)
@pytest.mark.parametrize("bias_correction, max_norm", [(True, 5.0), (False, None)])
def test_onebit_lamb_equals_its_reference(
    ranks, scale, ratio_of, compressor, C, bias_correction, max_norm
):
    options = {
        "warmup": T_W,
        "scale": scale,
        "ratio_of": ratio_of,
        "compressor": compressor,
        "bias_correction": bias_correction,
        "max_grad_norm": max_norm,
        "coefficient_bounds": BOUNDS,
    }
    history = run_threads(ranks, lambda c: train(c, onebit.OneBitLamb, options, more=more))
    assert len({*history[0][-1]["r"]}) > 2  # not all at the bounds
    assert_all_equal_reference(
        history,
        reference.one_bit_lamb(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks) if scale == "tensor" else fused_segments(ranks),
            tensors=TENSORS,
            T_w=T_W,
            fused=scale == "fused",
            c_bounds=BOUNDS,
            ratio_of=ratio_of,
            C=C,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
        frozen_at=T_W,
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_basic_onebit_lamb_equals_its_reference_and_freezes_the_coefficients(ranks):
    """ "LAMB + basic 1-bit": r = 1, so c is c_avg of the freeze for good; its own numbers for beta3 and the threshold, too."""
    options = {
        "warmup": T_W,
        "scale": "fused",
        "ratio_bounds": (1, 1),
        "coefficient_beta": 0.7,
        "ratio_threshold": 0.3,
    }
    history = run_threads(ranks, lambda c: train(c, onebit.OneBitLamb, options, more=more))
    assert_all_equal_reference(
        history,
        reference.one_bit_lamb(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=fused_segments(ranks),
            tensors=TENSORS,
            T_w=T_W,
            beta3=0.7,
            r_bounds=(1, 1),
            r_threshold=0.3,
            **reference_options(),
        ),
        frozen_at=T_W,
    )
    for state in history[0][T_W:]:
        np.testing.assert_array_equal(state["c"], history[0][T_W - 1]["c_avg"])


# ---- the identities


def histories(ranks, kind, options, dtype=torch.float32):
    return run_threads(ranks, lambda c: train(c, kind, options, dtype=dtype))


def assert_same_bits(ours, theirs):
    for own, other in zip(ours, theirs, strict=True):
        for a, b in zip(own, other, strict=True):
            assert a.keys() >= {"x", "m", "v"}
            for name in a.keys() & b.keys():
                np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_with_ratio_1_equals_adam_bit_for_bit(dtype):
    """c = 1 leaves lr as it is, and the update is Adam's own kernel."""
    clipped = {"max_grad_norm": 5.0}
    assert_same_bits(
        histories(3, onebit.DistributedAdam, clipped, dtype),
        histories(3, onebit.Lamb, clipped | {"coefficient_bounds": (1, 1)}, dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_onebit_lamb_with_ratio_1_equals_onebit_adam_bit_for_bit(ranks, dtype):
    """c = c_avg = r = 1 and a scale per tensor: the same momentum travels, errors included, and moves x alike."""
    options = {"warmup": T_W, "max_grad_norm": 5.0}
    ones = {
        "coefficient_bounds": (1, 1),
        "coefficient_beta": 0.0,
        "ratio_bounds": (1, 1),
        "scale": "tensor",
    }
    assert_same_bits(
        histories(ranks, onebit.OneBitAdam, options, dtype),
        histories(ranks, onebit.OneBitLamb, options | ones, dtype),
    )


def test_an_endless_warmup_equals_lamb_bit_for_bit():
    assert_same_bits(
        histories(2, onebit.Lamb, {}), histories(2, onebit.OneBitLamb, {"warmup": math.inf})
    )


def test_an_uncompressed_group_is_trained_by_plain_lamb_exactly():
    """compress=False: averaged exactly, its variance and its coefficients go on. Bit for bit."""

    def run(communicator, kind, options, **flag):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind(
            [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:], **flag)],
            communicator=communicator,
            **options,
        )
        for t in range(1, 41):
            for p, g in zip(params, split(local_gradient(t, np.zeros(D), communicator.rank))):
                p.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
        return joined(params[3:]), joined(params[:3])

    exact = run_threads(3, lambda c: run(c, onebit.Lamb, {}))
    mixed = run_threads(
        3, lambda c: run(c, onebit.OneBitLamb, {"warmup": 10, "scale": "fused"}, compress=False)
    )
    for (plain, rest), (excluded, compressed) in zip(exact, mixed):
        np.testing.assert_array_equal(plain, excluded)
        assert not np.array_equal(rest, compressed)


# ---- ratio, coefficients, momentum scaling


def numbers(run, name):
    return [float(run.optimizer.state[p][name]) for p in run.params]


@pytest.mark.parametrize(
    "largest, last, expected",
    [
        (1.05, 1.0, 1.05),  # near enough
        (3.0, 1.0, 1.1),  # kept near the last one
        (0.1, 1.0, 0.9),
        (9.0, 3.9, 4.0),  # the bounds come last
        (0.1, 0.51, 0.5),
        (math.inf, 2.0, 2.2),  # v_fresh = 0
        (-math.inf, 1.0, 1.0),  # a tensor without active elements
    ],
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
    """v_fresh falls by beta2 = 0.85 a step without gradient, so that 1 / beta2 > 1.1 and r grows by r_threshold; it falls if gradients grow."""
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
    """c_avg <- beta3 c_avg + (1 - beta3) c, from 0: recomputed from the coefficients that the optimizer shows."""
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


def test_a_coefficient_is_the_ratio_of_norms_within_its_bounds():
    """One step from m = v = 0 without bias correction, g = 1: u = 0.1 / sqrt(0.001); c = ||x|| / ||u||, clipped; 1 where x = 0 or g = 0."""
    params = [
        torch.nn.Parameter(torch.full((50,), value)) for value in (1.0, 1e-3, 100.0, 0.0, 1.0)
    ]
    optimizer = onebit.Lamb(
        params, lr=0.1, bias_correction=False, coefficient_bounds=(0.01, 2.0), communicator=Single()
    )
    for p in params:
        p.grad = torch.ones(50)
    params[4].grad = None
    optimizer.step()
    u = 0.1 / math.sqrt(0.001)
    expected = [1 / u, 0.01, 2.0, 1.0, 1.0]
    assert [float(optimizer.state[p]["coefficient"]) for p in params] == pytest.approx(
        expected, rel=1e-4
    )
    for p, before, c in zip(params[:4], (1.0, 1e-3, 100.0, 0.0), expected):
        torch.testing.assert_close(
            p.detach(), torch.full((50,), before - 0.1 * c * u), rtol=1e-4, atol=1e-6
        )


def test_scaling_is_the_mean_momentum_scale_over_the_tensors_own():
    assert scaling_coefficients([1.0, 3.0, 0.0]) == [2.0, pytest.approx(2 / 3), 1.0]
    assert scaling_coefficients([0.0, 0.0]) == [1.0, 1.0]


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_momentum_scaling_keeps_small_tensors_apart_from_large_ones(scale):
    """Gradients of 1e-4 beside 10: the first compressed momentum has each tensor's own size. Fused, one scale travels, so that
    scaling times |m| is the same number everywhere."""
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
            len(run.optimizer._parts[0].allreduce.compressor.partition.piece_lengths[0]) == 1
        )  # one scale
    else:
        assert numbers(run, "scaling") == [1.0, 1.0]


# ---- masks and zeros


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("scale", ["tensor", "fused"])
@pytest.mark.parametrize("ratio_of", ["variance", "root"])
def test_coordinates_without_gradient_change_nothing_for_the_others(ranks, scale, ratio_of):
    """Each tensor with as many zeros again, which never get a gradient: norms, scales, scaling and ratios are those of the half that lives."""

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
        (part,) = optimizer._parts
        assert not any(p[64:].any() for p in params)
        return [p[:64].detach() for p in params] + [part.coefficient, part.ratio, part.scaling]

    plain = run_threads(ranks, lambda c: run(c, 0))
    with_zeros = run_threads(ranks, lambda c: run(c, 64))
    for rank in range(ranks):
        assert same(plain[rank], with_zeros[rank]) and same(plain[rank], plain[0])
        assert len({*plain[rank][3].tolist()}) == 2


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_tensors_without_momentum_or_without_gradient_stay_finite(scale):
    """At the freeze tensor 0 has momentum, tensor 1 has none but a variance (beta1 = 0, and no gradient at step T_w), tensor 2 has neither."""
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
    """beta2 = 0, so that v is the last gradient's square: 0 for half of tensor 1, whose momentum is still there."""
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


# ---- a new warm-up, checkpoints


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_new_warmup_keeps_what_the_errors_hold_and_the_average_coefficient(scale):
    """m after = m before + (mean worker error + server error) / scaling; c_avg goes on; the next freeze makes scaling, v_fresh and r anew."""

    def run(communicator):
        run = make(
            communicator,
            onebit.OneBitLamb,
            shapes=((70,), (129,)),
            warmup=12,
            dtype=torch.float64,
            scale=scale,
        )
        for t in range(20):
            step(run, t, communicator.rank, scale=1.0 + t)
        (part,) = run.optimizer._parts
        before = (
            part.momentum.clone(),
            *part.errors(),
            part.scaling.clone(),
            part.coefficient_average.clone(),
        )
        run.optimizer.restart_warmup(4)
        after = (
            part.momentum.clone(),
            any(error.any() for error in part.errors()),
            part.coefficient_average.clone(),
        )
        for t in range(20, 24):
            assert run.optimizer.phase == "warmup"
            step(run, t, communicator.rank)
        return before, after, part.layout, part

    results = run_threads(3, run)
    layout = results[0][2]
    error = sum(r[0][1] for r in results) / 3 + torch.cat([r[0][2] for r in results])
    for (momentum, _, _, scaling, average), (new, left, average_after), _, part in results:
        for i, (m, e, expected) in enumerate(
            zip(*(layout.views(x) for x in (momentum, error, new)))
        ):
            torch.testing.assert_close(m + e / scaling[i], expected, rtol=1e-12, atol=1e-14)
        assert not left and torch.equal(average, average_after)
        assert part.ratio.tolist() == [1.0, 1.0] and torch.equal(part.fresh_variance, part.variance)
        assert not torch.equal(part.coefficient_average, average)
        own = [float(m.square().mean().sqrt()) for m in layout.views(part.momentum)]
        assert part.scaling.tolist() == (
            pytest.approx(scaling_coefficients(own)) if scale == "fused" else [1.0, 1.0]
        )


def test_a_freeze_without_any_coefficient_raises_with_the_remedy():
    """torch's AdamW at step 20, T_w = 15: there is nothing to multiply the learning rate by, and x would stand still."""
    run = make(Single(), onebit.OneBitLamb, warmup=15)
    adamw = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in run.params])
    for _ in range(20):
        for p in adamw.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        adamw.step()
    run.optimizer.load_state_dict(adamw.state_dict())
    torch.testing.assert_close(
        run.optimizer.state[run.params[0]]["exp_avg"],
        adamw.state[adamw.param_groups[0]["params"][0]]["exp_avg"],
    )
    with pytest.raises(RuntimeError, match="restart_warmup"):
        step(run, 0, 0)
    run.optimizer.restart_warmup(12)
    for t in range(14):
        step(run, t, 0)
    assert run.optimizer.phase == "compressed" and min(numbers(run, "coefficient")) > 0


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


def test_a_load_in_the_warmup_keeps_the_count_of_averaged_coefficients(recwarn):
    run, other = (make(Single(), onebit.OneBitLamb, warmup=12) for _ in range(2))
    for t in range(11):
        step(run, t, 0)
    other.optimizer.load_state_dict(saved(run.optimizer))
    step(other, 11, 0)
    assert other.optimizer.phase == "compressed" and not any(
        "coefficient_beta" in str(w.message) for w in recwarn
    )


def frozen(kind, **options):
    run = make(Single(), kind, warmup=12, bias_correction=False, **options)
    for t in range(14):
        step(run, t, 0)
    return saved(run.optimizer)


def test_a_compressed_phase_is_taken_over_only_by_what_can_go_on_with_it():
    fused, adam = frozen(onebit.OneBitLamb, scale="fused"), frozen(onebit.OneBitAdam)
    for state, kind, options, message in (
        (fused, onebit.OneBitLamb, {"warmup": 12, "scale": "tensor"}, "scale='fused': set scale"),
        (adam, onebit.OneBitLamb, {"warmup": 12}, "OneBitAdam, which has no coefficients"),
        (fused, onebit.OneBitAdam, {"warmup": 12}, "errors of OneBitLamb"),
        (fused, onebit.Lamb, {}, "load it into onebit.OneBitLamb"),
    ):
        for reset in (False, True) if kind is not onebit.OneBitAdam else (False,):
            run = make(Single(), kind, **options)
            with pytest.raises(ValueError, match=message):
                run.optimizer.load_state_dict(state, reset_errors=reset)
            assert (
                run.optimizer.steps == 0 and not run.optimizer.state[run.params[0]]["exp_avg"].any()
            )


def test_lambs_own_state_starts_a_onebit_lamb():
    lamb = make(Single(), onebit.Lamb)
    for t in range(5):
        step(lamb, t, 0)
    other = make(Single(), onebit.OneBitLamb, warmup=20)
    other.optimizer.load_state_dict(saved(lamb.optimizer))
    assert numbers(other, "coefficient") == numbers(lamb, "coefficient") and numbers(
        other, "coefficient_average"
    ) == [0.0, 0.0]


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


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_synchronized_checkpoint_of_lamb_serves_any_number_of_ranks(size, scale):
    """The errors lie where their parameters are, whatever chunks they were served in, and all ranks go on alike."""

    def save(communicator):
        run = make(communicator, onebit.OneBitLamb, shapes=((70,), (9, 15)), warmup=12, scale=scale)
        for t in range(16):
            step(run, t, communicator.rank)
        run.optimizer.synchronize()
        return run.params, saved(run.optimizer)

    params, state = run_threads(3, save)[1]

    def load(communicator):
        run = make(communicator, onebit.OneBitLamb, shapes=((70,), (9, 15)), warmup=12, scale=scale)
        with torch.no_grad():
            for p, value in zip(run.params, params):
                p.copy_(value)
        run.optimizer.load_state_dict(state)
        errors = [run.optimizer.state[p]["worker_error"].clone() for p in run.params]
        for t in range(5):
            step(run, t, communicator.rank)
        return errors, [p.detach() for p in run.params]

    results = run_threads(size, load)
    for errors, after in results:
        assert (
            same(errors, [entries["worker_error"] for entries in state["state"].values()])
            and errors[0].any()
        )
        assert same(after, results[0][1])


def test_distributed_checkpoint_keeps_the_numbers_of_each_tensor():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def trained(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
        optimizer = onebit.OneBitLamb(model.parameters(), warmup=12, communicator=Single())
        for t in range(steps):
            model(torch.full((2, 5), float(t))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (model, optimizer), (other_model, other) = trained(16), trained(1)
    set_optimizer_state_dict(other_model, other, get_optimizer_state_dict(model, optimizer))
    for p, q in zip(model.parameters(), other_model.parameters()):
        assert all(
            torch.equal(optimizer.state[p][name], other.state[q][name])
            for name in (*optimizer.numbers, "exp_avg_sq_fresh")
        )


# ---- traffic


@pytest.mark.parametrize(
    "dtype, bits", [(torch.float32, 32), (torch.bfloat16, 16), (torch.float16, 16)]
)
@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_runs_traffic_is_the_papers_share_of_lambs(dtype, bits, scale):
    """Volume reduction 1 / (w + (1 - w) / bits), w being the warm-up's share of the steps: here 2 of 12, as the paper's 16.7 %."""
    shapes = ((4000, 256), (256, 256), (256,), (7, 11))

    def sent(communicator, kind, **options):
        run = make(communicator, kind, shapes=shapes, dtype=dtype, **options)
        for p in run.params:
            p.grad = torch.ones_like(p)
        for _ in range(12):
            run.optimizer.step()
        return run.optimizer.communication.bytes_sent

    exact = run_threads(4, lambda c: sent(c, onebit.Lamb))
    compressed = run_threads(
        4, lambda c: sent(c, onebit.OneBitLamb, warmup=2, coefficient_beta=0.0, scale=scale)
    )
    w = 2 / 12
    for ours, lambs in zip(compressed, exact):
        assert lambs / ours == pytest.approx(1 / (w + (1 - w) / bits), rel=0.02)


# ---- wrong input


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"coefficient_bounds": (0.3, 0.01)}, ValueError, "0 < low <= high"),
        ({"coefficient_bounds": 10.0}, ValueError, "coefficient_bounds must be two numbers"),
        ({"coefficient_bounds": (0.0, 1.0)}, ValueError, "0 < low <= high"),
        ({"ratio_bounds": (math.nan, 1.0)}, ValueError, "ratio_bounds must"),
        ({"coefficient_beta": 1.0}, ValueError, "coefficient_beta must be a number in"),
        ({"ratio_threshold": -0.1}, ValueError, "ratio_threshold must"),
        ({"ratio_of": "roots"}, ValueError, "'variance', 'root'"),
        ({"scale": "layer"}, ValueError, "'tensor', 'fused'"),
        ({"max_coeff": 0.3}, TypeError, "no option 'max_coeff'"),
        ({"coefficient_betas": 0.9}, TypeError, "did you mean 'coefficient_beta'"),
        ({"freeze_step": 10}, TypeError, "did you mean 'warmup'"),
        ({"warmup": None}, TypeError, "OneBitLamb needs warmup="),
    ],
)
def test_wrong_options_of_lamb_name_the_remedy(options, error, message):
    with pytest.raises(error, match=message):
        onebit.OneBitLamb(P, **{"warmup": 3} | options)
    if "coefficient_bounds" in options:
        with pytest.raises(error, match=message):
            onebit.Lamb(P, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"coefficient_bounds": (0.1, 1)},
        {"coefficient_beta": 0.5},
        {"ratio_bounds": (0.5, 2)},
        {"ratio_threshold": 0.2},
        {"ratio_of": "root"},
        {"scale": "fused"},
    ],
    ids=str,
)
def test_ranks_with_different_options_of_lamb_all_raise(options):
    def run(communicator):
        run = make(
            communicator, onebit.OneBitLamb, warmup=3, **(options if communicator.rank == 1 else {})
        )
        with pytest.raises(RuntimeError, match=f"the ranks differ.*{next(iter(options))}"):
            step(run, 0, communicator.rank)
        return True

    assert run_threads(2, run) == [True, True]


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_resumed_run_makes_the_random_draws_of_a_stochastic_compressor_that_it_would_have_drawn(scale):
    options = {
        "kind": onebit.OneBitLamb,
        "warmup": 8,
        "coefficient_beta": 0.8,
        "scale": scale,
        "compressor": partial(Quantize, bits=4, stochastic=True),
        "shapes": ((70,), (9, 15), (0, 4)),
    }

    def run(communicator):
        straight = make(communicator, **options)
        for t in range(20):
            step(straight, t, communicator.rank)
            if t == 12:
                params, state = (
                    [p.detach().clone() for p in straight.params],
                    saved(straight.optimizer),
                )
        other = make(communicator, **options)
        with torch.no_grad():
            for p, value in zip(other.params, params):
                p.copy_(value)
        other.optimizer.load_state_dict(state)
        for t in range(13, 20):
            step(other, t, communicator.rank)
        return same(everything(straight), everything(other))

    assert all(run_threads(2, run))
