"""Runs that can be compared with `onebit.reference` at every step: six tensors in two groups, and
what the reference is told of them.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch

from helpers.cases import more
from onebit import reference
from onebit.compression import Identity, Quantize, Sign, TopK
from onebit.layout import Layout

SHAPES = [(7, 13), (), (129,), (0, 10), (3, 5, 2), (1,)]
WORLD_SIZES = [1, 3, *more(2, 4)]
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
    """Each rank pulls x towards its own target, with noise: a deterministic function of (t, x,
    rank).
    """
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
    """(worker segments, server segments): tensors, and tensors cut at the chunks' edges, as
    slices of the unpadded vector.
    """
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
    """Run an optimizer on this rank.

    Return its state after each step, flattened to the reference's vectors, and what `more` says of
    it.
    """
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


def steps_on_the_mean_gradient(optimizer, params, groups, dtype, max_norm):
    """Take STEPS steps of an optimizer of torch's on the clipped mean of three ranks'
    gradients.

    After each, its number.
    """
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


class Uniforms:
    """What the ranks draw for a stochastic compressor in round 0, 1, ...: u [n, d], then u [d],
    as the reference takes them.
    """

    def __init__(self, ranks, seed=0, stream=0, rounds=0):
        self.layout = Layout(SHAPES, ranks)
        self.ranks, self.seed, self.stream, self.rounds = ranks, seed, stream, rounds

    def _numbers(self, rank, side, count):
        place = np.random.SeedSequence([self.seed, self.stream, self.rounds, rank, side])
        generator = torch.Generator().manual_seed(int(place.generate_state(1, np.uint64)[0]))
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def workers(self):
        return np.stack(
            [
                joined(self.layout.views(self._numbers(rank, 0, self.layout.size)))
                for rank in range(self.ranks)
            ]
        )

    def servers(self):
        return joined(
            self.layout.views(
                torch.cat([self._numbers(rank, 1, self.layout.chunk) for rank in range(self.ranks)])
            )
        )

    def compressor(self, **options):
        """`reference.quantize` that draws them: a round is a call for the workers, then one
        for the servers.
        """

        def C(x, segments, active):
            if x.ndim == 2:
                return reference.quantize(x, segments, active, u=self.workers(), **options)
            y = reference.quantize(x, segments, active, u=self.servers(), **options)
            self.rounds += 1
            return y

        return C


def reference_of(compressor, ranks, rounds=0, stream=0):
    """The same compressor for `onebit.reference`."""
    kind, options = (
        (compressor.func, dict(compressor.keywords))
        if isinstance(compressor, partial)
        else (compressor, {})
    )
    if kind is TopK:
        return lambda x, _, active: reference.top_k(
            x, segments(ranks)[1], active, options.get("density", 0.01)
        )
    if kind is Quantize:
        told = {"levels": 2 ** (options.get("bits", 8) - 1) - 1, "norm": options.get("norm", "max")}
        if options.get("stochastic"):
            return Uniforms(ranks, options.get("seed", 0), stream, rounds).compressor(**told)
        return partial(reference.quantize, **told)
    known = {Sign: reference.one_bit, Identity: reference.identity}
    if kind not in known:
        pytest.skip(f"onebit.reference has no {kind.__name__}: write it there and name it here")
    return known[kind]
