"""1-bit LAMB equals its reference, and 1-bit Adam at the right options."""

import math

import numpy as np
import pytest
import torch
from helpers.cases import holds_for_each, more_of
from helpers.lamb_runs import (
    BOUNDS,
    TENSORS,
    assert_all_equal_reference,
    assert_same_bits,
    histories,
    lamb_state,
)
from helpers.reference_runs import (
    GROUPS,
    SHAPES,
    T_W,
    WORLD_SIZES,
    D,
    gradients_of_all,
    joined,
    local_gradient,
    reference_options,
    segments,
    split,
    start_values,
    train,
)
from helpers.small_runs import make, step

import onebit
from onebit import reference
from onebit.comm import run_threads
from onebit.compression import Identity
from onebit.layout import Layout

P = [torch.nn.Parameter(torch.zeros(3))]


def fused_segments(ranks):
    """One scale for everything a worker sends, and one for each server's chunk, as slices of
    the unpadded vector.
    """
    layout = Layout(SHAPES, ranks)
    real = torch.zeros(layout.size + 1, dtype=torch.int64)
    real[1:] = layout.real.cumsum(0)
    edges = [int(real[chunk]) for chunk in range(0, layout.size + 1, layout.chunk)]
    return [slice(0, D)], [slice(a, b) for a, b in zip(edges, edges[1:])]


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
@pytest.mark.parametrize("bias_correction, max_norm", [(True, 5.0), *more_of((False, None))])
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
    history = run_threads(ranks, lambda c: train(c, onebit.OneBitLamb, options, more=lamb_state))
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
    """ "LAMB + basic 1-bit": r = 1, so c is c_avg of the freeze for good.

    Its own numbers for beta3 and the threshold, too.
    """
    options = {
        "warmup": T_W,
        "scale": "fused",
        "ratio_bounds": (1, 1),
        "coefficient_beta": 0.7,
        "ratio_threshold": 0.3,
    }
    history = run_threads(ranks, lambda c: train(c, onebit.OneBitLamb, options, more=lamb_state))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_onebit_lamb_with_ratio_1_equals_onebit_adam_bit_for_bit(ranks, dtype):
    """c = c_avg = r = 1 and a scale per tensor: the same momentum travels, errors included, and
    moves x alike.
    """
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


@pytest.mark.parametrize(
    "dtype, bits", [(torch.float32, 32), (torch.bfloat16, 16), *more_of((torch.float16, 16))]
)
@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_runs_traffic_is_the_papers_share_of_lambs(dtype, bits, scale):
    """Volume reduction 1 / (w + (1 - w) / bits), w being the warm-up's share of the steps: here
    2 of 12, as the paper's 16.7 %.
    """
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


@holds_for_each(
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
    ]
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
