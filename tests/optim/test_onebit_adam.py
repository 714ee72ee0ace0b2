"""1-bit Adam equals its reference and torch's AdamW in its warm-up.

The identities between Adam's relatives hold.
"""

import math

import numpy as np
import pytest
import torch
from helpers.cases import more, more_of
from helpers.reference_runs import (
    GROUPS,
    T_W,
    WORLD_SIZES,
    D,
    assert_equals_reference,
    gradients_of_all,
    joined,
    local_gradient,
    per_coordinate,
    reference_options,
    segments,
    split,
    start_values,
    steps_on_the_mean_gradient,
    train,
)
from helpers.small_runs import everything, make, step

import onebit
from onebit import reference
from onebit.comm import Single
from onebit.compression import Identity


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "bias_correction, max_norm", [(True, None), (False, 5.0), *more_of((True, 5.0), (False, None))]
)
@pytest.mark.parametrize(
    "compressor, C", [(None, reference.one_bit), (Identity, reference.identity)]
)
def test_onebit_adam_equals_its_reference(ranks, bias_correction, compressor, C, max_norm):
    options = {
        "warmup": T_W,
        "bias_correction": bias_correction,
        "compressor": compressor,
        "max_grad_norm": max_norm,
    }
    history = onebit.comm.run_threads(ranks, lambda c: train(c, onebit.OneBitAdam, options))
    assert_equals_reference(
        history,
        reference.one_bit_adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            T_w=T_W,
            C=C,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
        corrected_at=T_W,
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_naive_one_bit_adam_equals_its_reference(ranks):
    history = onebit.comm.run_threads(
        ranks, lambda c: train(c, onebit.NaiveOneBitAdam, {"max_grad_norm": 5.0})
    )
    assert_equals_reference(
        history,
        reference.naive_one_bit_adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            **reference_options(),
            max_norm=5.0,
        ),
    )


@pytest.mark.parametrize("ranks", [3, *more(2, 4)])
@pytest.mark.parametrize(
    "kind, options",
    [
        (onebit.DistributedAdam, {}),
        (onebit.OneBitAdam, {"warmup": 10}),
        (onebit.NaiveOneBitAdam, {}),
        (onebit.Lamb, {}),
        (onebit.QuantizedVarianceAdam, {}),
        (onebit.LazyVarianceAdam, {"tau": 1}),
        (onebit.OneBitLamb, {"warmup": 10}),
        (onebit.OneBitLamb, {"warmup": 10, "scale": "fused"}),
    ],
)
def test_every_rank_holds_the_same_bits_after_every_step(ranks, kind, options):
    history = onebit.comm.run_threads(ranks, lambda c: train(c, kind, options, 25, torch.float32))
    for steps in zip(*history):
        for state in steps[1:]:
            for name in "xmv":
                np.testing.assert_array_equal(state[name], steps[0][name])


@pytest.mark.report("R35", "R56")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_warmup_equals_torch_adamw_on_the_mean_gradient(dtype, max_norm):
    """torch's AdamW after DistributedDataParallel sees the mean gradient and clips its norm.

    The arithmetic is the same.
    """
    history = onebit.comm.run_threads(
        3,
        lambda c: train(
            c, onebit.OneBitAdam, {"warmup": math.inf, "max_grad_norm": max_norm}, dtype=dtype
        ),
    )
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    optimizer = torch.optim.AdamW(
        [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:])]
    )
    for t in steps_on_the_mean_gradient(optimizer, params, GROUPS, dtype, max_norm):
        np.testing.assert_allclose(
            history[0][t - 1]["x"],
            joined(params),
            rtol=1e-6 if dtype == torch.float32 else 1e-12,
            atol=1e-6,
        )


@pytest.mark.report("R30")
def test_infinite_warmup_equals_distributed_adam_bit_for_bit():
    adam = onebit.comm.run_threads(
        2, lambda c: train(c, onebit.DistributedAdam, {}, dtype=torch.float32)
    )
    endless = onebit.comm.run_threads(
        2, lambda c: train(c, onebit.OneBitAdam, {"warmup": 10**9}, dtype=torch.float32)
    )
    for a, b in zip(adam[0], endless[0]):
        for name in "xmv":
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.report("R12", "R46")
def test_an_uncompressed_group_is_trained_by_plain_adam_exactly():
    """compress=False: averaged exactly, its variance goes on; nothing of the other groups leaks
    in.

    Bit for bit.
    """

    def run(communicator, kind, options):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        flag = {"compress": False} if kind is onebit.OneBitAdam else {}
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

    exact = onebit.comm.run_threads(3, lambda c: run(c, onebit.DistributedAdam, {}))
    mixed = onebit.comm.run_threads(3, lambda c: run(c, onebit.OneBitAdam, {"warmup": 10}))
    for (plain, rest), (excluded, compressed) in zip(exact, mixed):
        np.testing.assert_array_equal(plain, excluded)
        assert not np.array_equal(rest, compressed)


@pytest.mark.report("R52")
def test_beta1_matters_and_a_constant_gradient_drives_the_momentum_to_it():
    def constant(t, x, rank):
        return np.linspace(0.5, 1.5, D) * np.where(np.arange(D) % 2, 1, -1)

    history = onebit.comm.run_threads(
        2, lambda c: train(c, onebit.OneBitAdam, {"warmup": 30}, 30, gradient=constant)
    )
    expected = constant(0, 0, 0) * (1 - per_coordinate(lambda g: g["betas"][0]) ** 30)
    np.testing.assert_allclose(history[0][-1]["m"], expected, rtol=1e-12)


@pytest.mark.report("R55")
def test_the_first_step_moves_the_parameters_and_counts():
    run = make(Single(), warmup=5, lr=1.0)
    before = everything(run)
    step(run, 0, 0)
    assert run.optimizer.steps == 1 and not torch.equal(before[0], run.params[0])
    assert {int(run.optimizer.state[p]["step"]) for p in run.params} == {1}
