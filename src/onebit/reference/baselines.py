"""What the papers compare with: naive compression, SGD and its relatives, other variances."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from onebit.reference.common import (
    Array,
    Compressor,
    Gradient,
    Groups,
    Number,
    Rate,
    Sides,
    State,
    clip_each,
    clip_local,
    clip_mean,
    compressed_average,
    identity,
    one_bit,
    start,
    update,
)


def naive_one_bit_adam(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
    C: Compressor = one_bit,
) -> Iterator[State]:
    """Error-compensated 1-bit *gradients* ("1-bit Adam", section 3.2).

    Momentum and variance both follow the compressed gradient.
    """
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm)
        g, delta, delta_bar = compressed_average(g, delta, delta_bar, C, *groups, everywhere)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


# ---- SGD and its relatives


def sgd(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    max_norm: float | None = None,
) -> Iterator[State]:
    """SGD with momentum and coupled weight decay on the mean gradient."""
    x, m, v, delta, delta_bar = start(x, n)
    for t in count(1):
        g = clip_mean(gradient(t, x).mean(0), max_norm)
        m = momentum * m + (1 - dampening) * (g + weight_decay * x)
        x = x - gamma(t) * m
        yield State(x, m, v, delta, delta_bar)


def double_squeeze(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    weight_decay: Number = 0.0,
    max_norm: float | None = None,
    C: Compressor = one_bit,
) -> Iterator[State]:
    """SGD on gradients that are compressed with error feedback by workers and servers."""
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm) + weight_decay * x
        g, delta, delta_bar = compressed_average(g, delta, delta_bar, C, *groups, everywhere)
        x = x - gamma(t) * g
        yield State(x, m, v, delta, delta_bar)


def ef_momentum_sgd(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    momentum: Number = 0.9,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    max_norm: float | None = None,
    C: Compressor = one_bit,
) -> Iterator[State]:
    """Momentum SGD with the compressed momentum of 1-bit Adam, lines 6 to 12."""
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm) + weight_decay * x
        m = momentum * m + (1 - dampening) * g
        m, delta, delta_bar = compressed_average(m, delta, delta_bar, C, *groups, everywhere)
        x = x - gamma(t) * m
        yield State(x, m, v, delta, delta_bar)


def local_sgd(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    tau: int = 4,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    max_norm: float | None = None,
) -> Iterator[State]:
    """SGD steps of each worker alone; every tau steps parameters and momenta are averaged.

    x and m are [n, d], and `gradient(t, x)` gives each worker's g_i at its own x_i.
    """
    x, m, v, delta, delta_bar = start(x, n)
    x, m = np.tile(x, (n, 1)), np.tile(m, (n, 1))
    for t in count(1):
        g = gradient(t, x)
        g = clip_each(g, max_norm) if t % tau else clip_local(g, max_norm)
        m = momentum * m + (1 - dampening) * (g + weight_decay * x)
        x = x - gamma(t) * m
        if t % tau == 0:
            x = np.tile(x.mean(0), (n, 1))
            m = np.tile(m.mean(0), (n, 1)) if np.any(momentum) else np.zeros_like(m)
        yield State(x, m, v, delta, delta_bar)


# ---- compressors beyond one bit


def quantize(
    x: Array,
    groups: Groups,
    active: Array,
    levels: int,
    norm: str = "max",
    u: Array | None = None,
) -> Array:
    """C[x] = ||x|| k / s on each group, with s = `levels` and k = s x / ||x||; 0 where not active.

    k is rounded to the nearest whole number. With u, random numbers in [0, 1) of x's shape, k is
    rounded up where u is below its fractional part; with norm="l2" that is QSGD.
    """
    y = np.zeros_like(x)
    for s in groups:
        z = np.where(active[s], x[..., s], 0.0)
        if z.shape[-1]:
            scale = (
                np.abs(z).max(-1, keepdims=True)
                if norm == "max"
                else np.sqrt((z**2).sum(-1, keepdims=True))
            )
            k = z / np.where(scale == 0, 1.0, scale) * levels
            k = np.rint(k) if u is None else np.floor(k) + (u[..., s] < k - np.floor(k))
            y[..., s] = scale * k / levels
    return y


def top_k(x: Array, groups: Groups, active: Array, density: float) -> Array:
    """C[x] = x where |x| is among the ceil(density * count) largest of a group, 0 elsewhere.

    Of equal ones the first is taken. A tensor that is cut among servers sends its part from each,
    so that the workers' groups are the servers' groups here.
    """
    y = np.zeros_like(x)
    for s in groups:
        z = np.where(active[s], x[..., s], 0.0)
        k = int(np.ceil(density * active[s].sum()))
        largest = np.argsort(-np.abs(z), axis=-1, kind="stable")[..., :k]
        np.put_along_axis(y[..., s], largest, np.take_along_axis(z, largest, -1), -1)
    return y


# ---- Adam with a compressed variance, and with one that is seldom averaged


def quantized_variance_adam(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    Q: Compressor,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
    C: Compressor = one_bit,
) -> Iterator[State]:
    """Figure 12 of "1-bit Adam": the variance is compressed in every step.

    The momentum goes through C with error feedback. v_i = beta2 v + (1 - beta2) g_i^2 goes through
    Q on its way to the servers and back, without error feedback.
    """
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm)
        m, delta, delta_bar = compressed_average(
            beta1 * m + (1 - beta1) * g, delta, delta_bar, C, *groups, everywhere
        )
        v_hat = Q(beta2 * v + (1 - beta2) * g**2, groups[0], everywhere)
        v = Q(v_hat.mean(0), groups[1], everywhere)
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


def lazy_variance_adam(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    tau: int,
    steps_with: str = "own",
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
    C: Compressor = one_bit,
) -> Iterator[State]:
    """Figure 13 of "1-bit Adam": v takes in local gradients and is averaged every tau steps.

    The momentum goes through C with error feedback. x and v are [n, d], each worker's own.
    steps_with="own": a worker divides by its own v, and x is averaged whenever v is.
    steps_with="average": all divide by the last average (before the first one, by that of step 1),
    so that x stays the same on all workers.
    """
    x, m, _, delta, delta_bar = start(x, n)
    x, v = np.tile(x, (n, 1)), np.zeros((n, len(x)))
    everywhere = np.ones(len(m), bool)
    average = None
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm)
        m, delta, delta_bar = compressed_average(
            beta1 * m + (1 - beta1) * g, delta, delta_bar, C, *groups, everywhere
        )
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        if t % tau == 0:
            x, v = np.tile(x.mean(0), (n, 1)), np.tile(v.mean(0), (n, 1))
        if t % tau == 0 or average is None:
            average = v.mean(0) / c2
        divisor = v / c2 if steps_with == "own" else average
        x = update(x, m, np.where(divisor > 0, divisor, np.inf), gamma(t), eta, weight_decay, c1)
        yield State(x, m, v, delta, delta_bar)


# ---- what Theorem 1 of 1-bit Adam is about


def preconditioned_momentum_sgd(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    v: Number = 1.0,
    m: Number = 0.0,
    beta: float = 0.9,
    C: Compressor = identity,
    reset_every: int | None = None,
) -> Iterator[State]:
    """Momentum SGD under a fixed preconditioner 1 / sqrt(v), with the momentum sent through C.

    C=one_bit is the second stage of 1-bit Adam, lines 3 to 13, without eta: it goes on from the
    momentum m and the variance v at the freeze. The errors are set to 0 after every `reset_every`
    steps: with 1 there is no error feedback, with None they are never reset. The State of such a
    step still shows the errors that the step left.
    """
    x, zero, _, delta, delta_bar = start(x, n)
    m, v, everywhere = zero + m, zero + v, np.ones(len(x), bool)
    for t in count(1):
        m = beta * m + (1 - beta) * gradient(t, x)  # lines 5-6
        # lines 7-12
        m, delta, delta_bar = compressed_average(m, delta, delta_bar, C, *groups, everywhere)
        x = update(x, m, v, gamma(t), 0.0, 0.0)  # line 13
        yield State(x, m, v, delta, delta_bar)
        if reset_every is not None and t % reset_every == 0:
            delta, delta_bar = np.zeros_like(delta), np.zeros_like(delta_bar)
