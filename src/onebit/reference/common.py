"""What every algorithm of the reference is made of: its state, a compressed average, clipping."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Number = float | Array  # the same for all parameters, or an array [d]
Gradient = Callable[[int, Array], Array]  # (t, x) -> g [n, d]
Rate = Callable[[int], Number]  # t -> gamma
Groups = Sequence[slice]  # the slices of the last axis that share one scale
Sides = tuple[Groups, Groups]  # those of the workers and those of the servers
Compressor = Callable[[Array, Groups, Array], Array]  # (x, groups, active) -> C[x]


class State(NamedTuple):
    """After a step: x, m, v, delta_bar [d] and delta [n, d]."""

    x: Array
    m: Array
    v: Array
    delta: Array
    delta_bar: Array


def start(x: Array, n: int) -> State:
    """Line 1 of Algorithm 1: everything but x is zero."""
    d = len(x)
    return State(np.array(x, float), np.zeros(d), np.zeros(d), np.zeros((n, d)), np.zeros(d))


# ---- compression


def sign(x: Array) -> Array:
    """The sign with sign(0) = +1, because one bit has no room for zero."""
    return np.where(x >= 0, 1.0, -1.0)


def one_bit(x: Array, groups: Groups, active: Array) -> Array:
    """C[x] = ||x||_2 / sqrt(count) * sign(x) on each group; 0 where not active."""
    y = np.zeros_like(x)
    for s in groups:
        live = active[s]
        if live.any():
            scale = np.sqrt((x[..., s][..., live] ** 2).mean(-1, keepdims=True))
            y[..., s][..., live] = scale * sign(x[..., s][..., live])
    return y


def identity(x: Array, groups: Groups, active: Array) -> Array:
    """C[x] = x: the 32-bit member of the family."""
    return np.where(active, x, 0.0)


def compressed_average(
    z: Array,
    delta: Array,
    delta_bar: Array,
    C: Compressor,
    worker_groups: Groups,
    server_groups: Groups,
    active: Array,
) -> tuple[Array, Array, Array]:
    """Lines 7 to 11 of Algorithm 1: z [n, d] -> (its compressed average [d], delta, delta_bar)."""
    z = np.where(active, z, 0.0)
    z_hat = C(z + delta, worker_groups, active)  # line 7
    delta = z + delta - z_hat
    average = z_hat.mean(0)  # line 9
    z_bar = C(average + delta_bar, server_groups, active)  # line 10
    delta_bar = average + delta_bar - z_bar
    return z_bar, delta, delta_bar


# ---- clipping


def clip(g: Array, norm: float, max_norm: float | None) -> Array:
    """g times the factor that brings `norm` down to max_norm, as torch.nn.utils.clip_grad_norm_."""
    return g if max_norm is None else g * min(1.0, max_norm / (norm + 1e-6))


def clip_mean(g: Array, max_norm: float | None) -> Array:
    """An averaged gradient g [d], clipped by its own norm."""
    return clip(g, float(np.linalg.norm(g)), max_norm)


def clip_local(g: Array, max_norm: float | None) -> Array:
    """g [n, d], all by one factor.

    The norm is sqrt(mean_i ||g_i||^2), an upper bound of the norm of the mean gradient.
    """
    return clip(g, np.sqrt((g**2).sum(1).mean()), max_norm)


def clip_each(g: Array, max_norm: float | None) -> Array:
    """g [n, d], each worker by its own norm, which needs no message."""
    return np.stack([clip(g_i, float(np.linalg.norm(g_i)), max_norm) for g_i in g])


# ---- Adam's step


def largest_step(beta1: Number, beta2: Number) -> Number:
    """Adam's own bound on |m_hat| / (sqrt(v_hat) + eta): Kingma and Ba, section 2.1."""
    return np.maximum(1.0, (1 - beta1) / np.sqrt(1 - np.asarray(beta2)))


def update(
    x: Array,
    m: Array,
    v: Array,
    gamma: Number,
    eta: Number,
    weight_decay: Number,
    c1: Number = 1.0,
    c2: Number = 1.0,
    bound: Number = np.inf,
) -> Array:
    """Line 13 of Algorithm 1 with eta, decoupled weight decay and bias corrections c1 and c2.

    The paper has no bias correction: there both are 1. Nor has it a bound.
    """
    direction = np.clip((m / c1) / (np.sqrt(v / c2) + eta), -bound, bound)
    return x * (1 - gamma * weight_decay) - gamma * direction
