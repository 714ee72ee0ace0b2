"""Every algorithm in plain NumPy float64, all workers on the leading axis, in the letters of the papers. Read this first.

    n workers, d parameters      x [d]        parameters            g [n, d]      local gradients
    m [d]  momentum              v [d]        variance              gamma, eta    learning rate, Adam's epsilon
    delta [n, d]  worker error   delta_bar [d]  server error        C             a compressor, see `one_bit`

Each algorithm is a generator over steps t = 1, 2, ...: it asks `gradient(t, x)` for g, takes one step and yields its `State`.
Line numbers are those of Algorithm 1 in "1-bit Adam" (Tang et al., ICML 2021). `gamma(t)` gives the learning rate of step t;
every hyper-parameter may be a scalar or a [d] array (parameter groups).
"""

from collections import namedtuple
from itertools import count

import numpy as np

State = namedtuple("State", "x m v delta delta_bar")


def sign(x):
    """sign(0) = +1: one bit has no room for zero."""
    return np.where(x >= 0, 1.0, -1.0)


def one_bit(x, segments, active):
    """C[x] = ||x||_2 / sqrt(count) * sign(x) on each segment (a slice of the last axis); 0 where not active."""
    y = np.zeros_like(x)
    for s in segments:
        live = active[s]
        if live.any():
            scale = np.sqrt((x[..., s][..., live] ** 2).mean(-1, keepdims=True))
            y[..., s][..., live] = scale * sign(x[..., s][..., live])
    return y


def identity(x, segments, active):
    """C[x] = x: the 32-bit member of the family."""
    return np.where(active, x, 0.0)


def compressed_average(z, delta, delta_bar, C, worker_segments, server_segments, active):
    """Lines 7 to 11: z [n, d] -> (its compressed average [d], delta, delta_bar)."""
    z = np.where(active, z, 0.0)
    z_hat = C(z + delta, worker_segments, active)                                   # line 7
    delta = z + delta - z_hat
    average = z_hat.mean(0)                                                         # line 9
    z_bar = C(average + delta_bar, server_segments, active)                         # line 10
    delta_bar = average + delta_bar - z_bar
    return z_bar, delta, delta_bar


def clip(g, norm, max_norm):
    return g if max_norm is None else g * min(1.0, max_norm / (norm + 1e-6))


def clip_mean(g, max_norm):
    """g [d] scaled to at most max_norm: what torch.nn.utils.clip_grad_norm_ does to an averaged gradient."""
    return clip(g, np.linalg.norm(g), max_norm)


def clip_local(g, max_norm):
    """g [n, d], all by one factor, from sqrt(mean_i ||g_i||^2): an upper bound of the norm of the mean."""
    return clip(g, np.sqrt((g**2).sum(1).mean()), max_norm)


def update(x, m, v, gamma, eta, weight_decay, c1=1.0, c2=1.0):
    """Line 13 with eta, decoupled weight decay and bias corrections c1, c2 (both 1 in the paper)."""
    return x * (1 - gamma * weight_decay) - gamma * (m / c1) / (np.sqrt(v / c2) + eta)


def start(x, n):
    """Line 1."""
    d = len(x)
    return State(np.array(x, float), np.zeros(d), np.zeros(d), np.zeros((n, d)), np.zeros(d))


def adam(x, gradient, n, gamma, beta1=0.9, beta2=0.999, eta=1e-8, weight_decay=0.0, bias_correction=True, max_norm=None):
    """Adam with decoupled weight decay on the mean gradient."""
    x, m, v, delta, delta_bar = start(x, n)
    for t in count(1):
        g = clip_mean(gradient(t, x).mean(0), max_norm)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


def naive_one_bit_adam(x, gradient, n, gamma, segments, beta1=0.9, beta2=0.999, eta=1e-8, weight_decay=0.0,
                       bias_correction=True, max_norm=None, C=one_bit):
    """Section 3.2: error-compensated 1-bit *gradients*; momentum and variance both follow the compressed gradient."""
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm)
        g, delta, delta_bar = compressed_average(g, delta, delta_bar, C, *segments, everywhere)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


def one_bit_adam(x, gradient, n, gamma, segments, T_w, beta1=0.9, beta2=0.999, eta=1e-8, weight_decay=0.0,
                 bias_correction=True, max_norm=None, C=one_bit):
    """Algorithm 1. `segments` = (worker segments, server segments): the slices of x that share one scale.

    C=identity gives "1-bit Adam (32 bits)": frozen variance, momentum sent as it is.
    Coordinates with v = 0 at the freeze are not active. With bias correction v is divided by 1 - beta2^T_w once, at the freeze.
    """
    warmup = adam(x, gradient, n, gamma, beta1, beta2, eta, weight_decay, bias_correction, max_norm)
    for _ in range(T_w):                                                            # line 2
        x, m, v, delta, delta_bar = state = next(warmup)
        yield state
    if bias_correction:
        v = v / (1 - beta2**T_w)
    active = v > 0
    for t in count(T_w + 1):                                                        # line 3
        g = clip_local(gradient(t, x), max_norm)                                    # lines 4-5
        m = beta1 * m + (1 - beta1) * g                                             # line 6
        m, delta, delta_bar = compressed_average(m, delta, delta_bar, C, *segments, active)   # lines 7-12
        c1 = 1 - beta1**t if bias_correction else 1.0
        x = update(x, m, v, gamma(t), eta, weight_decay, c1)                        # line 13
        yield State(x, m, v, delta, delta_bar)


# ---- momentum SGD


def momentum_sgd(x, gradient, n, gamma, segments, v=1.0, m=0.0, beta=0.9, C=identity, reset_every=None):
    """Momentum SGD under a fixed preconditioner 1 / sqrt(v), with the momentum sent through C: what Theorem 1 is about.

    C=one_bit is the second stage of 1-bit Adam, lines 3 to 13, from the momentum m and the variance v at the freeze, without eta.
    The errors are set to 0 after every `reset_every` steps: 1 is no error feedback at all, None never.
    The State of such a step still shows the errors that it left, before they are set to 0.
    """
    x, zero, _, delta, delta_bar = start(x, n)
    m, v, everywhere = zero + m, zero + v, np.ones(len(x), bool)
    for t in count(1):
        m = beta * m + (1 - beta) * gradient(t, x)                                  # lines 5-6
        m, delta, delta_bar = compressed_average(m, delta, delta_bar, C, *segments, everywhere)   # lines 7-12
        x = update(x, m, v, gamma(t), 0.0, 0.0)                                     # line 13
        yield State(x, m, v, delta, delta_bar)
        if reset_every is not None and t % reset_every == 0:
            delta, delta_bar = np.zeros_like(delta), np.zeros_like(delta_bar)
