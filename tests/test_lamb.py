"""LAMB and 1-bit LAMB equal their references, become Adam and 1-bit Adam at the right options, and lose nothing between phases."""

import math
from itertools import islice

import numpy as np
import pytest
import torch
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
from onebit.comm import run_threads
from onebit.compression import Identity
from onebit.layout import Layout

TENSORS = [slice(a, b) for a, b in zip(OFFSETS, OFFSETS[1:])]
NUMBERS = {"c": "coefficient", "c_avg": "coefficient_average", "r": "ratio", "scaling": "scaling"}
BOUNDS = (0.1, 2.0)  # wide enough for some tensors to lie inside


def more(optimizer, params):
    """The state that LAMB has beside Adam's."""
    state = optimizer.state
    found = {letter: np.array([float(state[p][name]) for p in params]) for letter, name in NUMBERS.items() if name in state[params[0]]}
    return found | ({"v_fresh": joined([state[p]["exp_avg_sq_fresh"] for p in params])} if "exp_avg_sq_fresh" in state[params[0]] else {})


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
            for name in set(state) & {"c", "c_avg", "r", "scaling", "v_fresh"} - ({"scaling", "v_fresh"} if t == frozen_at else set()):
                np.testing.assert_allclose(state[name], getattr(letters, name), rtol=1e-9, atol=1e-12, err_msg=f"{name} of step {t}")


# ---- the references


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_lamb_equals_its_reference(ranks, bias_correction, max_norm):
    options = {"bias_correction": bias_correction, "max_grad_norm": max_norm, "coefficient_bounds": BOUNDS}
    history = run_threads(ranks, lambda c: train(c, onebit.Lamb, options, more=more))
    assert len({*history[0][-1]["c"]}) > 3  # not all at the bounds
    assert_all_equal_reference(history, reference.lamb(
        joined(start_values()), gradients_of_all(ranks), ranks, tensors=TENSORS, c_bounds=BOUNDS, **reference_options(),
        bias_correction=bias_correction, max_norm=max_norm))


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("scale", ["tensor", "fused"])
@pytest.mark.parametrize("ratio_of", ["variance", "root"])
@pytest.mark.parametrize("compressor, C", [(None, reference.one_bit), (Identity, reference.identity)])
@pytest.mark.parametrize("bias_correction, max_norm", [(True, 5.0), (False, None)])
def test_onebit_lamb_equals_its_reference(ranks, scale, ratio_of, compressor, C, bias_correction, max_norm):
    options = {"warmup": T_W, "scale": scale, "ratio_of": ratio_of, "compressor": compressor, "bias_correction": bias_correction,
               "max_grad_norm": max_norm, "coefficient_bounds": BOUNDS}
    history = run_threads(ranks, lambda c: train(c, onebit.OneBitLamb, options, more=more))
    assert len({*history[0][-1]["r"]}) > 2  # not all at the bounds
    assert_all_equal_reference(history, reference.one_bit_lamb(
        joined(start_values()), gradients_of_all(ranks), ranks, segments=segments(ranks) if scale == "tensor" else fused_segments(ranks),
        tensors=TENSORS, T_w=T_W, fused=scale == "fused", c_bounds=BOUNDS, ratio_of=ratio_of, C=C, **reference_options(),
        bias_correction=bias_correction, max_norm=max_norm), frozen_at=T_W)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_basic_onebit_lamb_equals_its_reference_and_freezes_the_coefficients(ranks):
    """"LAMB + basic 1-bit": r = 1, so c is c_avg of the freeze for good; its own numbers for beta3 and the threshold, too."""
    options = {"warmup": T_W, "scale": "fused", "ratio_bounds": (1, 1), "coefficient_beta": 0.7, "ratio_threshold": 0.3}
    history = run_threads(ranks, lambda c: train(c, onebit.OneBitLamb, options, more=more))
    assert_all_equal_reference(history, reference.one_bit_lamb(
        joined(start_values()), gradients_of_all(ranks), ranks, segments=fused_segments(ranks), tensors=TENSORS, T_w=T_W, beta3=0.7,
        r_bounds=(1, 1), r_threshold=0.3, **reference_options()), frozen_at=T_W)
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
    assert_same_bits(histories(3, onebit.DistributedAdam, clipped, dtype),
                     histories(3, onebit.Lamb, clipped | {"coefficient_bounds": (1, 1)}, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_onebit_lamb_with_ratio_1_equals_onebit_adam_bit_for_bit(ranks, dtype):
    """c = c_avg = r = 1 and a scale per tensor: the same momentum travels, errors included, and moves x alike."""
    options = {"warmup": T_W, "max_grad_norm": 5.0}
    ones = {"coefficient_bounds": (1, 1), "coefficient_beta": 0.0, "ratio_bounds": (1, 1), "scale": "tensor"}
    assert_same_bits(histories(ranks, onebit.OneBitAdam, options, dtype), histories(ranks, onebit.OneBitLamb, options | ones, dtype))


def test_an_endless_warmup_equals_lamb_bit_for_bit():
    assert_same_bits(histories(2, onebit.Lamb, {}), histories(2, onebit.OneBitLamb, {"warmup": math.inf}))


def test_an_uncompressed_group_is_trained_by_plain_lamb_exactly():
    """compress=False: averaged exactly, its variance and its coefficients go on. Bit for bit."""

    def run(communicator, kind, options, **flag):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind([dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:], **flag)], communicator=communicator, **options)
        for t in range(1, 41):
            for p, g in zip(params, split(local_gradient(t, np.zeros(D), communicator.rank))):
                p.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
        return joined(params[3:]), joined(params[:3])

    exact = run_threads(3, lambda c: run(c, onebit.Lamb, {}))
    mixed = run_threads(3, lambda c: run(c, onebit.OneBitLamb, {"warmup": 10, "scale": "fused"}, compress=False))
    for (plain, rest), (excluded, compressed) in zip(exact, mixed):
        np.testing.assert_array_equal(plain, excluded)
        assert not np.array_equal(rest, compressed)
