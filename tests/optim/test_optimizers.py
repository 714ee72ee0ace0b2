"""Each optimizer equals its reference, state tensor by state tensor, and the identities between them hold."""

import math

import numpy as np
import pytest
import torch

import onebit
from onebit import reference
from onebit.compression import Identity
from onebit.layout import Layout

SHAPES = [(7, 13), (), (129,), (0, 10), (3, 5, 2), (1,)]
WORLD_SIZES = [1, 2, 3, 4]
STEPS, T_W = 50, 20
GROUPS = [  # two parameter groups with options of their own: tensors 0-2 and 3-5
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0},
]
NUMELS = [math.prod(shape) for shape in SHAPES]
OFFSETS = np.concatenate([[0], np.cumsum(NUMELS)])
D = int(OFFSETS[-1])
DEAD = np.zeros(D, bool)
DEAD[5:60] = DEAD[-1] = True  # coordinates that never get a gradient


def start_values(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]


def local_gradient(t, x, rank):
    """Each rank pulls x towards its own target, with noise: a deterministic function of (t, x, rank)."""
    random = np.random.default_rng([t, rank])
    scale = np.repeat([1.0, 10.0, 1e-3, 1.0, 0.1, 5.0], NUMELS)
    return np.where(DEAD, 0.0, scale * (x - 0.3 * rank + random.standard_normal(D)))


def learning_rate(lr, t):
    return lr * min(1.0, t / 10)


def split(x):
    return [x[a:b].reshape(shape) for a, b, shape in zip(OFFSETS, OFFSETS[1:], SHAPES)]


def joined(tensors):
    return np.concatenate([t.detach().double().numpy().ravel() for t in tensors])


def per_coordinate(option):
    return np.repeat([float(option(GROUPS[0]))] * 3 + [float(option(GROUPS[1]))] * 3, NUMELS)


def reference_options():
    lr = per_coordinate(lambda g: g["lr"])
    return {
        "gamma": lambda t: learning_rate(lr, t),
        "beta1": per_coordinate(lambda g: g["betas"][0]),
        "beta2": per_coordinate(lambda g: g["betas"][1]),
        "eta": per_coordinate(lambda g: g["eps"]),
        "weight_decay": per_coordinate(lambda g: g["weight_decay"]),
    }


def segments(ranks):
    """(worker segments, server segments): tensors, and tensors cut at the chunks' edges, as slices of the unpadded vector."""
    layout = Layout(SHAPES, ranks)
    worker = [slice(a, b) for a, b in zip(OFFSETS, OFFSETS[1:])]
    server = []
    for start, numel, offset in zip(layout.starts, layout.numels, OFFSETS):
        edges = sorted(
            {
                start,
                start + numel,
                *(e for e in range(0, layout.size, layout.chunk) if start < e < start + numel),
            }
        )
        server += [slice(offset + a - start, offset + b - start) for a, b in zip(edges, edges[1:])]
    return worker, server


def train(
    communicator,
    kind,
    options,
    steps=STEPS,
    dtype=torch.float64,
    gradient=local_gradient,
    more=lambda optimizer, params: {},
):
    """Run an optimizer on this rank; return its state after each step, flattened to the reference's vectors, and what `more` says of it."""
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    groups = [dict(GROUPS[0], params=params[:3]), dict(GROUPS[1], params=params[3:])]
    optimizer = kind(groups, communicator=communicator, **options)
    history = []
    for t in range(1, steps + 1):
        for group, own in zip(optimizer.param_groups, GROUPS):
            group["lr"] = learning_rate(own["lr"], t)
        for p, g in zip(params, split(gradient(t, joined(params), communicator.rank))):
            p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        history.append(snapshot(optimizer, params) | more(optimizer, params))
    return history


def snapshot(optimizer, params):
    state = {
        "x": joined(params),
        "m": joined([optimizer.state[p]["exp_avg"] for p in params]),
        "v": joined([optimizer.state[p]["exp_avg_sq"] for p in params]),
    }
    if optimizer.phase == "compressed":  # `in` would not do: errors are computed when asked for
        state["delta"] = joined([optimizer.state[p]["worker_error"] for p in params])
        state["server_error"] = optimizer.state[params[0]]["server_error"].double().numpy().copy()
    return state


def server_error(history, t, ranks):
    """delta_bar [d] of step t, put together from the ranks' chunks."""
    whole = torch.tensor(np.concatenate([h[t]["server_error"] for h in history]))
    return joined(Layout(SHAPES, ranks).views(whole))


def assert_equals_reference(history, generator, corrected_at=None):
    ranks = len(history)
    for t, expected in zip(range(len(history[0])), generator):
        for rank in range(ranks):
            state = history[rank][t]
            close = dict(rtol=1e-9, atol=1e-12, err_msg=f"step {t + 1}, rank {rank}")
            np.testing.assert_allclose(state["x"], expected.x, **close)
            np.testing.assert_allclose(state["m"], expected.m, **close)
            if (
                t + 1 != corrected_at
            ):  # the distributed one corrects v at the end of step T_w, the reference after it
                np.testing.assert_allclose(state["v"], expected.v, **close)
            if "delta" in state:
                np.testing.assert_allclose(state["delta"], expected.delta[rank], **close)
        if "delta" in history[0][t]:
            np.testing.assert_allclose(
                server_error(history, t, ranks), expected.delta_bar, rtol=1e-9, atol=1e-12
            )


def gradients_of_all(ranks, gradient=local_gradient):
    return lambda t, x: np.stack([gradient(t, x, rank) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_adam_equals_its_reference(ranks, bias_correction, max_norm):
    options = {"bias_correction": bias_correction, "max_grad_norm": max_norm}
    history = onebit.comm.run_threads(ranks, lambda c: train(c, onebit.DistributedAdam, options))
    assert_equals_reference(
        history,
        reference.adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            **reference_options(),
            bias_correction=bias_correction,
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(
    "compressor, C", [(None, reference.one_bit), (Identity, reference.identity)]
)
@pytest.mark.parametrize("max_norm", [None, 5.0])
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


@pytest.mark.parametrize("ranks", WORLD_SIZES)
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


def steps_on_the_mean_gradient(optimizer, params, groups, dtype, max_norm):
    """Take STEPS steps of an optimizer of torch's on the clipped mean of three ranks' gradients; after each, its number."""
    for t in range(1, STEPS + 1):
        for group, own in zip(optimizer.param_groups, groups):
            group["lr"] = learning_rate(own["lr"], t)
        locals_ = [
            [torch.tensor(g, dtype=dtype) for g in split(local_gradient(t, joined(params), rank))]
            for rank in range(3)
        ]
        for p, *gradients in zip(params, *locals_):
            p.grad = sum(gradients[1:], gradients[0]) / 3
        if max_norm:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        yield t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_warmup_equals_torch_adamw_on_the_mean_gradient(dtype, max_norm):
    """torch's AdamW after DistributedDataParallel sees the mean gradient and clips its norm; the arithmetic is the same."""
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


def test_an_uncompressed_group_is_trained_by_plain_adam_exactly():
    """compress=False: averaged exactly, its variance goes on; nothing of the other groups leaks in. Bit for bit."""

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


def test_beta1_matters_and_a_constant_gradient_drives_the_momentum_to_it():
    def constant(t, x, rank):
        return np.linspace(0.5, 1.5, D) * np.where(np.arange(D) % 2, 1, -1)

    history = onebit.comm.run_threads(
        2, lambda c: train(c, onebit.OneBitAdam, {"warmup": 30}, 30, gradient=constant)
    )
    expected = constant(0, 0, 0) * (1 - per_coordinate(lambda g: g["betas"][0]) ** 30)
    np.testing.assert_allclose(history[0][-1]["m"], expected, rtol=1e-12)
