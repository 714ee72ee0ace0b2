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
LocalState = namedtuple(
    "LocalState", (*State._fields, "u")
)  # of optimizers with local steps: x, m, u [n, d]


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
    z_hat = C(z + delta, worker_segments, active)  # line 7
    delta = z + delta - z_hat
    average = z_hat.mean(0)  # line 9
    z_bar = C(average + delta_bar, server_segments, active)  # line 10
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


def clip_each(g, max_norm):
    """g [n, d], each worker by its own norm: what can be had without a message."""
    return np.stack([clip(g_i, np.linalg.norm(g_i), max_norm) for g_i in g])


def update(x, m, v, gamma, eta, weight_decay, c1=1.0, c2=1.0):
    """Line 13 with eta, decoupled weight decay and bias corrections c1, c2 (both 1 in the paper)."""
    return x * (1 - gamma * weight_decay) - gamma * (m / c1) / (np.sqrt(v / c2) + eta)


def start(x, n):
    """Line 1."""
    d = len(x)
    return State(np.array(x, float), np.zeros(d), np.zeros(d), np.zeros((n, d)), np.zeros(d))


def adam(
    x,
    gradient,
    n,
    gamma,
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
):
    """Adam with decoupled weight decay on the mean gradient."""
    x, m, v, delta, delta_bar = start(x, n)
    for t in count(1):
        g = clip_mean(gradient(t, x).mean(0), max_norm)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


def naive_one_bit_adam(
    x,
    gradient,
    n,
    gamma,
    segments,
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
    C=one_bit,
):
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


def one_bit_adam(
    x,
    gradient,
    n,
    gamma,
    segments,
    T_w,
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
    C=one_bit,
):
    """Algorithm 1. `segments` = (worker segments, server segments): the slices of x that share one scale.

    C=identity gives "1-bit Adam (32 bits)": frozen variance, momentum sent as it is.
    Coordinates with v = 0 at the freeze are not active. With bias correction v is divided by 1 - beta2^T_w once, at the freeze.
    """
    warmup = adam(x, gradient, n, gamma, beta1, beta2, eta, weight_decay, bias_correction, max_norm)
    for _ in range(T_w):  # line 2
        x, m, v, delta, delta_bar = state = next(warmup)
        yield state
    if bias_correction:
        v = v / (1 - beta2**T_w)
    active = v > 0
    for t in count(T_w + 1):  # line 3
        g = clip_local(gradient(t, x), max_norm)  # lines 4-5
        m = beta1 * m + (1 - beta1) * g  # line 6
        m, delta, delta_bar = compressed_average(
            m, delta, delta_bar, C, *segments, active
        )  # lines 7-12
        c1 = 1 - beta1**t if bias_correction else 1.0
        x = update(x, m, v, gamma(t), eta, weight_decay, c1)  # line 13
        yield State(x, m, v, delta, delta_bar)


# ---- 0/1 Adam


def zero_one_adam(
    x,
    gradient,
    n,
    gamma,
    segments,
    T_v,
    T_u,
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
    C=one_bit,
):
    """0/1 Adam (Lu et al., ICLR 2023): local steps, whose mean momentum is averaged with one bit at the steps T_u; v advances at the steps T_v.

    Between syncs the workers' parameters and momenta differ: `gradient` gets x [n, d]. While v stays, a worker has moved by
    u / (sqrt(v) + eta), so the average of u over the sum of learning rates gives both the common momentum and, from x_sync on, the common
    parameters. While the learning rate is 0 the momentum itself is averaged. A step of T_v takes the mean gradient for m as well, and needs
    no other message. T_v and T_u are sets of steps, see
    `onebit.optim.step_sets.step_sets`: v changes only where u = 0.
    Coordinates with v = 0 take no part. With bias correction, gamma stands for gamma / (1 - beta1^t), and v for v / (1 - beta2^k)
    after k updates.
    """
    x, m, v, delta, delta_bar = start(x, n)
    x_sync, x, m, u = x, np.tile(x, (n, 1)), np.tile(m, (n, 1)), np.zeros_like(delta)
    gammas, decay, k = 0.0, 1.0, 0
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
        x = shrink * x - rate * m * scale
        u, gammas, decay = u + rate * m, gammas + rate, decay * shrink
        if t in T_u:
            if t in T_v:
                m = m[0]  # everybody's
            else:
                z = np.where(gammas > 0, u / np.where(gammas > 0, gammas, 1.0), m)
                m, delta, delta_bar = compressed_average(z, delta, delta_bar, C, *segments, active)
            x_sync = decay * x_sync - gammas * m * scale
            x, m, u = np.tile(x_sync, (n, 1)), np.tile(m, (n, 1)), np.zeros_like(u)
            gammas, decay = 0.0, 1.0
        yield LocalState(x, m, v, delta, delta_bar, u)


# ---- LAMB and 1-bit LAMB: line numbers of Algorithm 1 in "1-bit LAMB" (Li et al., HiPC 2022); `tensors`: the slices of x, one for each tensor

LambState = namedtuple("LambState", (*State._fields, "c"))  # c [tensors], of the last step
OneBitLambState = namedtuple(
    "OneBitLambState", (*LambState._fields, "v_fresh", "c_avg", "r", "scaling")
)  # [d], then [tensors] each


def clipped(x, bounds):
    return min(max(x, bounds[0]), bounds[1])


def spread(values, tensors):
    """[tensors] -> [d]."""
    return np.concatenate([np.full(s.stop - s.start, value) for s, value in zip(tensors, values)])


def trust_ratios(x, u, tensors, bounds):
    """c = clip(||x|| / ||u||, c_min, c_max) of each tensor; 1 if a norm is 0."""
    norms = [(np.linalg.norm(x[s]), np.linalg.norm(u[s])) for s in tensors]
    return np.array([clipped(a / b, bounds) if a and b else 1.0 for a, b in norms])


def lamb(
    x,
    gradient,
    n,
    gamma,
    tensors,
    c_bounds=(0.01, 0.3),
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
):
    """LAMB with decoupled weight decay on the mean gradient, equation 1: each tensor's step is multiplied by its own c."""
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


def momentum_scaling(m, tensors, active):
    """United over own: the mean of the tensors' rms(m) over each one's; where that is 0, 1, and the mean leaves it out."""
    own = np.array(
        [np.sqrt(np.mean(m[s][active[s]] ** 2)) if active[s].any() else 0.0 for s in tensors]
    )
    return (
        np.where(own > 0, own[own > 0].mean() / np.where(own > 0, own, 1), 1.0)
        if own.any()
        else np.ones(len(tensors))
    )


def next_ratios(frozen, fresh, r, tensors, active, bounds, threshold):
    """The largest frozen / fresh of each tensor, kept near the last r, then within the bounds; r where nothing is active."""
    largest = [np.max(frozen[s][active[s]] / fresh[s][active[s]], initial=-np.inf) for s in tensors]
    near = [
        clipped(new, ((1 - threshold) * old, (1 + threshold) * old)) for new, old in zip(largest, r)
    ]
    return np.array(
        [old if new == -np.inf else clipped(by, bounds) for new, by, old in zip(largest, near, r)]
    )


def one_bit_lamb(
    x,
    gradient,
    n,
    gamma,
    segments,
    tensors,
    T_w,
    fused=True,
    c_bounds=(0.01, 0.3),
    beta3=0.9,
    r_bounds=(0.5, 4.0),
    r_threshold=0.1,
    ratio_of="variance",
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
    C=one_bit,
):
    """Algorithm 1. `segments` as in `one_bit_adam`; fused: they span tensors, so that the momenta are scaled before compression.

    r_bounds=(1, 1) gives "LAMB + basic 1-bit", in which c is frozen as v is. ratio_of="root" compares sqrt(v) + eta, the authors' code.
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
    for t in count(T_w + 1):
        g = clip_local(gradient(t, x), max_norm)
        z = s * (beta1 * m + (1 - beta1) * g)
        z_bar, delta, delta_bar = compressed_average(z, delta, delta_bar, C, *segments, active)
        last, m = m, z_bar / s
        g = (m - beta1 * last) / (1 - beta1)
        v_fresh = beta2 * v_fresh + (1 - beta2) * g**2
        frozen, fresh = (
            (v, v_fresh) if ratio_of == "variance" else (np.sqrt(v) + eta, np.sqrt(v_fresh) + eta)
        )
        r = next_ratios(
            frozen, fresh, r, tensors, active, r_bounds, r_threshold
        )  # line 17 and the clips
        c = r * c_avg
        c1 = 1 - beta1**t if bias_correction else 1.0
        x = x - gamma(t) * spread(c, tensors) * (
            m / c1 / (np.sqrt(v) + eta) + weight_decay * x
        )  # line 21
        yield OneBitLambState(x, m, v, delta, delta_bar, c, v_fresh, c_avg, r, scaling)


# ---- SGD and its relatives


def sgd(x, gradient, n, gamma, momentum=0.0, dampening=0.0, weight_decay=0.0, max_norm=None):
    """SGD with momentum and coupled weight decay on the mean gradient."""
    x, m, v, delta, delta_bar = start(x, n)
    for t in count(1):
        g = clip_mean(gradient(t, x).mean(0), max_norm)
        m = momentum * m + (1 - dampening) * (g + weight_decay * x)
        x = x - gamma(t) * m
        yield State(x, m, v, delta, delta_bar)


def double_squeeze(x, gradient, n, gamma, segments, weight_decay=0.0, max_norm=None, C=one_bit):
    """SGD on error-compensated compressed gradients, both ways."""
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm) + weight_decay * x
        g, delta, delta_bar = compressed_average(g, delta, delta_bar, C, *segments, everywhere)
        x = x - gamma(t) * g
        yield State(x, m, v, delta, delta_bar)


def ef_momentum_sgd(
    x,
    gradient,
    n,
    gamma,
    segments,
    momentum=0.9,
    dampening=0.0,
    weight_decay=0.0,
    max_norm=None,
    C=one_bit,
):
    """Momentum SGD with the compressed momentum of 1-bit Adam, lines 6 to 12."""
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm) + weight_decay * x
        m = momentum * m + (1 - dampening) * g
        m, delta, delta_bar = compressed_average(m, delta, delta_bar, C, *segments, everywhere)
        x = x - gamma(t) * m
        yield State(x, m, v, delta, delta_bar)


def local_sgd(
    x, gradient, n, gamma, tau=4, momentum=0.0, dampening=0.0, weight_decay=0.0, max_norm=None
):
    """Here x and m are [n, d], and `gradient(t, x)` gives g_i at x_i: each worker has its own. Every tau steps they are averaged."""
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


# ---- compressors beyond one bit, and Adam with a compressed or a late variance


def quantize(x, segments, active, levels, norm="max", u=None):
    """C[x] = ||x|| k / s, k = s x / ||x|| rounded to the nearest whole number, s = `levels`, on each segment; 0 where not active.

    With u, numbers like x from [0, 1), k is rounded up if u is below what it has after the point: QSGD, if norm is "l2".
    """
    y = np.zeros_like(x)
    for s in segments:
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


def top_k(x, segments, active, density):
    """C[x] = x where |x| is among the ceil(density * count) largest of a segment, the first of equals; else 0.

    One that is cut among servers sends its part from each: take the server segments for workers, too.
    """
    y = np.zeros_like(x)
    for s in segments:
        z = np.where(active[s], x[..., s], 0.0)
        largest = np.argsort(-np.abs(z), axis=-1, kind="stable")[
            ..., : int(np.ceil(density * active[s].sum()))
        ]
        np.put_along_axis(y[..., s], largest, np.take_along_axis(z, largest, -1), -1)
    return y


def quantized_variance_adam(
    x,
    gradient,
    n,
    gamma,
    segments,
    Q,
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
    C=one_bit,
):
    """Figure 12: momentum through C with error feedback; v_i = beta2 v + (1 - beta2) g_i^2 through Q, there and back, without."""
    x, m, v, delta, delta_bar = start(x, n)
    everywhere = np.ones(len(x), bool)
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm)
        m, delta, delta_bar = compressed_average(
            beta1 * m + (1 - beta1) * g, delta, delta_bar, C, *segments, everywhere
        )
        v_hat = Q(beta2 * v + (1 - beta2) * g**2, segments[0], everywhere)
        v = Q(v_hat.mean(0), segments[1], everywhere)
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        x = update(x, m, v, gamma(t), eta, weight_decay, c1, c2)
        yield State(x, m, v, delta, delta_bar)


def lazy_variance_adam(
    x,
    gradient,
    n,
    gamma,
    segments,
    tau,
    steps_with="own",
    beta1=0.9,
    beta2=0.999,
    eta=1e-8,
    weight_decay=0.0,
    bias_correction=True,
    max_norm=None,
    C=one_bit,
):
    """Figure 13: momentum through C with error feedback; v [n, d] takes in local gradients and is averaged every tau steps.

    x and v are [n, d]: every worker has its own. steps_with="own": it divides by its own v, and x is averaged when v is; "average": by
    the last average (of the first step until there is one), so that x stays the same.
    """
    x, m, _, delta, delta_bar = start(x, n)
    x, v = np.tile(x, (n, 1)), np.zeros((n, len(x)))
    everywhere = np.ones(len(m), bool)
    average = None
    for t in count(1):
        g = clip_local(gradient(t, x), max_norm)
        m, delta, delta_bar = compressed_average(
            beta1 * m + (1 - beta1) * g, delta, delta_bar, C, *segments, everywhere
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
    x, gradient, n, gamma, segments, v=1.0, m=0.0, beta=0.9, C=identity, reset_every=None
):
    """Momentum SGD under a fixed preconditioner 1 / sqrt(v), with the momentum sent through C.

    C=one_bit is the second stage of 1-bit Adam, lines 3 to 13, from the momentum m and the variance v at the freeze, without eta.
    The errors are set to 0 after every `reset_every` steps: 1 is no error feedback at all, None never.
    The State of such a step still shows the errors that it left, before they are set to 0.
    """
    x, zero, _, delta, delta_bar = start(x, n)
    m, v, everywhere = zero + m, zero + v, np.ones(len(x), bool)
    for t in count(1):
        m = beta * m + (1 - beta) * gradient(t, x)  # lines 5-6
        m, delta, delta_bar = compressed_average(
            m, delta, delta_bar, C, *segments, everywhere
        )  # lines 7-12
        x = update(x, m, v, gamma(t), 0.0, 0.0)  # line 13
        yield State(x, m, v, delta, delta_bar)
        if reset_every is not None and t % reset_every == 0:
            delta, delta_bar = np.zeros_like(delta), np.zeros_like(delta_bar)
