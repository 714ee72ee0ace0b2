"""The algorithms of the three papers, and Adam and LAMB, with which they start.

Line numbers in `one_bit_adam` are those of Algorithm 1 in "1-bit Adam" (Tang et al., ICML 2021),
those in `one_bit_lamb` of Algorithm 1 in "1-bit LAMB" (Li et al., HiPC 2022).
"""

from collections.abc import Iterator, Set
from itertools import count
from typing import NamedTuple

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
    largest_step,
    one_bit,
    start,
    update,
)

Bounds = tuple[float, float]


class LocalState(NamedTuple):
    """After a step of 0/1 Adam: as `State`, but x and m are [n, d].

    u [n, d] sums gamma m over the local steps since the last sync.
    """

    x: Array
    m: Array
    v: Array
    delta: Array
    delta_bar: Array
    u: Array


class LambState(NamedTuple):
    """After a step of LAMB: as `State`, and c [tensors], the coefficients of this step."""

    x: Array
    m: Array
    v: Array
    delta: Array
    delta_bar: Array
    c: Array


class OneBitLambState(NamedTuple):
    """After a step of 1-bit LAMB: as `LambState`, and v_fresh [d], c_avg, r, scaling [tensors]."""

    x: Array
    m: Array
    v: Array
    delta: Array
    delta_bar: Array
    c: Array
    v_fresh: Array
    c_avg: Array
    r: Array
    scaling: Array


def adam(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
) -> Iterator[State]:
    """Adam with decoupled weight decay on the mean gradient."""
    x, m, v, delta, delta_bar = start(x, n)
    for t in count(1):
        g = clip_mean(gradient(t, x).mean(0), max_norm)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


def one_bit_adam(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    T_w: int,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
    C: Compressor = one_bit,
    bound_steps: bool = True,
) -> Iterator[State]:
    """Algorithm 1 of "1-bit Adam". `groups` = (worker groups, server groups), see the package.

    C=identity gives "1-bit Adam (32 bits)": the variance is frozen and the momentum sent as it is.
    Coordinates with v = 0 at the freeze are not active. With bias correction, v is divided once,
    at the freeze, by 1 - beta2^T_w. bound_steps=False is the paper's: under a frozen v nothing
    bounds m / sqrt(v).
    """
    warmup = adam(x, gradient, n, gamma, beta1, beta2, eta, weight_decay, bias_correction, max_norm)
    for _ in range(T_w):  # line 2
        x, m, v, delta, delta_bar = state = next(warmup)
        yield state
    if bias_correction:
        v = v / (1 - beta2**T_w)
    active = v > 0
    bound = largest_step(beta1, beta2) if bound_steps else np.inf
    for t in count(T_w + 1):  # line 3
        g = clip_local(gradient(t, x), max_norm)  # lines 4-5
        m = beta1 * m + (1 - beta1) * g  # line 6
        # lines 7-12
        m, delta, delta_bar = compressed_average(m, delta, delta_bar, C, *groups, active)
        c1 = 1 - beta1**t if bias_correction else 1.0
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, bound=bound)  # line 13
        yield State(x, m, v, delta, delta_bar)


# ---- 0/1 Adam


def zero_one_adam(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    T_v: Set[int],
    T_u: Set[int],
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
    C: Compressor = one_bit,
    bound_steps: bool = True,
) -> Iterator[LocalState]:
    """0/1 Adam (Lu et al., ICLR 2023): local steps with one-bit syncs at the steps T_u.

    v advances at the steps T_v. Between syncs the workers' parameters and momenta differ, so that
    `gradient` gets x [n, d]. While v stays the same, a worker has moved by u / (sqrt(v) + eta).
    Therefore the average of u over the sum of learning rates gives the common momentum and, from
    x_sync on, the common parameters. While the learning rate is 0, the momentum itself is averaged.
    A step of T_v takes the mean gradient for m as well, and needs no other message.

    T_v and T_u are sets of steps in which v changes only where u = 0; `onebit.ZeroOneAdam` says how
    it chooses them. Coordinates with v = 0 take no part. With bias correction, gamma stands for
    gamma / (1 - beta1^t), and v for v / (1 - beta2^k) after k updates. Unless `bound_steps` is
    False, |m_hat| / (sqrt(v) + eta) is bounded as in `one_bit_adam`, in a sync with the m_hat and
    the correction of its own step; a step of T_v is Adam's, and has no bound.
    """
    x, m, v, delta, delta_bar = start(x, n)
    x_sync, x, m, u = x, np.tile(x, (n, 1)), np.tile(m, (n, 1)), np.zeros_like(delta)
    gammas: Number
    decay: Number
    gammas, decay, k = 0.0, 1.0, 0
    bound = largest_step(beta1, beta2) if bound_steps else np.inf
    for t in count(1):
        g = gradient(t, x)
        g = clip_local(g, max_norm) if t in T_v | T_u else clip_each(g, max_norm)
        if t in T_v:
            g = np.tile(g.mean(0), (n, 1))
            v = beta2 * v + (1 - beta2) * g[0] ** 2
            k += 1
        active = v > 0
        m = beta1 * m + (1 - beta1) * np.where(active, g, 0.0)
        c1, c2 = (1 - beta1**t, 1 - beta2**k) if bias_correction else (1.0, 1.0)
        rate, shrink = gamma(t) / c1, 1 - gamma(t) * weight_decay
        scale = np.where(active, 1 / (np.sqrt(v / c2) + eta), 0.0)
        limit = np.inf if t in T_v else bound * c1
        x = shrink * x - rate * np.clip(m * scale, -limit, limit)
        u, gammas, decay = u + rate * m, gammas + rate, decay * shrink
        if t in T_u:
            if t in T_v:
                m = m[0]  # the same on all workers
            else:
                z = np.where(gammas > 0, u / np.where(gammas > 0, gammas, 1.0), m)
                m, delta, delta_bar = compressed_average(z, delta, delta_bar, C, *groups, active)
            x_sync = decay * x_sync - gammas * np.clip(m * scale, -limit, limit)
            x, m, u = np.tile(x_sync, (n, 1)), np.tile(m, (n, 1)), np.zeros_like(u)
            gammas, decay = 0.0, 1.0
        yield LocalState(x, m, v, delta, delta_bar, u)


# ---- LAMB and 1-bit LAMB; `tensors`: the slices of x, one for each tensor


def clipped(x: float, bounds: Bounds) -> float:
    """The number in [low, high] that is nearest to x."""
    return min(max(x, bounds[0]), bounds[1])


def spread(values: Array, tensors: Groups) -> Array:
    """[tensors] -> [d]: each tensor's value at all of its elements."""
    return np.concatenate([np.full(s.stop - s.start, value) for s, value in zip(tensors, values)])


def trust_ratios(x: Array, u: Array, tensors: Groups, bounds: Bounds) -> Array:
    """c = clip(||x|| / ||u||, c_min, c_max) of each tensor; 1 if a norm is 0."""
    norms = [(float(np.linalg.norm(x[s])), float(np.linalg.norm(u[s]))) for s in tensors]
    return np.array([clipped(a / b, bounds) if a and b else 1.0 for a, b in norms])


def lamb(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    tensors: Groups,
    c_bounds: Bounds = (0.01, 0.3),
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
) -> Iterator[LambState]:
    """LAMB with decoupled weight decay on the mean gradient, equation 1.

    Each tensor's step is multiplied by its own c.
    """
    x, m, v, delta, delta_bar = start(x, n)
    for t in count(1):
        g = clip_mean(gradient(t, x).mean(0), max_norm)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        u = m / c1 / (np.sqrt(v / c2) + eta) + weight_decay * x
        c = trust_ratios(x, u, tensors, c_bounds)
        x = x - gamma(t) * spread(c, tensors) * u
        yield LambState(x, m, v, delta, delta_bar, c)


def momentum_scaling(m: Array, tensors: Groups, active: Array) -> Array:
    """The mean of the tensors' rms(m), divided by each tensor's own rms(m).

    A tensor whose rms is 0 gets 1, and the mean leaves it out.
    """
    own = np.array(
        [np.sqrt(np.mean(m[s][active[s]] ** 2)) if active[s].any() else 0.0 for s in tensors]
    )
    return (
        np.where(own > 0, own[own > 0].mean() / np.where(own > 0, own, 1), 1.0)
        if own.any()
        else np.ones(len(tensors))
    )


def next_ratios(
    frozen: Array,
    fresh: Array,
    r: Array,
    tensors: Groups,
    active: Array,
    bounds: Bounds,
    threshold: float,
) -> Array:
    """The largest frozen / fresh of each tensor, clipped near the last r and then to the bounds.

    A tensor without active elements keeps its r.
    """
    largest = [np.max(frozen[s][active[s]] / fresh[s][active[s]], initial=-np.inf) for s in tensors]
    near = [
        clipped(new, ((1 - threshold) * old, (1 + threshold) * old)) for new, old in zip(largest, r)
    ]
    return np.array(
        [old if new == -np.inf else clipped(by, bounds) for new, by, old in zip(largest, near, r)]
    )


def one_bit_lamb(
    x: Array,
    gradient: Gradient,
    n: int,
    gamma: Rate,
    groups: Sides,
    tensors: Groups,
    T_w: int,
    fused: bool = True,
    c_bounds: Bounds = (0.01, 0.3),
    beta3: float = 0.9,
    r_bounds: Bounds = (0.5, 4.0),
    r_threshold: float = 0.1,
    ratio_of: str = "variance",
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eta: Number = 1e-8,
    weight_decay: Number = 0.0,
    bias_correction: bool = True,
    max_norm: float | None = None,
    C: Compressor = one_bit,
    bound_steps: bool = True,
) -> Iterator[OneBitLambState]:
    """Algorithm 1 of "1-bit LAMB".

    fused: the groups span tensors, so that the momenta are scaled before compression.
    r_bounds=(1, 1) gives "LAMB + basic 1-bit", in which c is frozen as v is. ratio_of="root"
    compares sqrt(v) + eta, as the authors' code does, instead of v. Unless `bound_steps` is False,
    the direction m_hat / (sqrt(v) + eta) is bounded as in `one_bit_adam`, before c is applied.
    """
    c_avg, r, scaling = np.zeros(len(tensors)), np.ones(len(tensors)), np.ones(len(tensors))
    warmup = lamb(
        x,
        gradient,
        n,
        gamma,
        tensors,
        c_bounds,
        beta1,
        beta2,
        eta,
        weight_decay,
        bias_correction,
        max_norm,
    )
    for _ in range(T_w):
        x, m, v, delta, delta_bar, c = state = next(warmup)
        c_avg = beta3 * c_avg + (1 - beta3) * c
        yield OneBitLambState(*state, np.zeros(len(x)), c_avg, r, scaling)
    if bias_correction:
        v = v / (1 - beta2**T_w)
    v_fresh, active = v, v > 0
    scaling = momentum_scaling(m, tensors, active) if fused else scaling
    s = spread(scaling, tensors)
    bound = largest_step(beta1, beta2) if bound_steps else np.inf
    for t in count(T_w + 1):
        g = clip_local(gradient(t, x), max_norm)
        z = s * (beta1 * m + (1 - beta1) * g)
        z_bar, delta, delta_bar = compressed_average(z, delta, delta_bar, C, *groups, active)
        last, m = m, z_bar / s
        g = (m - beta1 * last) / (1 - beta1)
        v_fresh = beta2 * v_fresh + (1 - beta2) * g**2
        frozen, fresh = (
            (v, v_fresh) if ratio_of == "variance" else (np.sqrt(v) + eta, np.sqrt(v_fresh) + eta)
        )
        # line 17 and the clips after it
        r = next_ratios(frozen, fresh, r, tensors, active, r_bounds, r_threshold)
        c = r * c_avg
        c1 = 1 - beta1**t if bias_correction else 1.0
        u = np.clip(m / c1 / (np.sqrt(v) + eta), -bound, bound) + weight_decay * x
        x = x - gamma(t) * spread(c, tensors) * u  # line 21
        yield OneBitLambState(x, m, v, delta, delta_bar, c, v_fresh, c_avg, r, scaling)
