"""What the tests of the quantized and of the lazy variance have in common."""

from functools import partial

import numpy as np

from helpers.reference_runs import (
    STEPS,
    gradients_of_all,
    joined,
    reference_options,
    server_error,
    start_values,
)
from onebit import LazyVarianceAdam, QuantizedVarianceAdam
from onebit.compression import Quantize

QSGD = {bits: partial(Quantize, bits=bits, norm="l2", stochastic=True) for bits in (4, 8, 16)}
ODD_SHAPES = ((70,), (9, 15), (0, 4), (), (257, 3))


def assert_equals(history, generator):
    """As `reference_runs.assert_equals_reference`, for a reference whose x and v may have a row
    for each rank.
    """
    ranks = len(history)
    for t, expected in zip(range(len(history[0])), generator):
        for rank in range(ranks):
            own = {"x": expected.x, "v": expected.v, "m": expected.m, "delta": expected.delta[rank]}
            for name, value in own.items():
                value = value[rank] if name in "xv" and value.ndim == 2 else value
                np.testing.assert_allclose(
                    history[rank][t][name],
                    value,
                    rtol=1e-9,
                    atol=1e-12,
                    err_msg=f"{name}, step {t + 1}, rank {rank}",
                )
        np.testing.assert_allclose(
            server_error(history, t, ranks), expected.delta_bar, rtol=1e-9, atol=1e-12
        )


def adam_on_mean_squares(ranks):
    """x after each step of Adam whose variance takes in mean_i g_i^2 instead of (mean_i g_i)^2."""
    told = reference_options()
    x = joined(start_values())
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, STEPS + 1):
        g = gradients_of_all(ranks)(t, x)
        m = told["beta1"] * m + (1 - told["beta1"]) * g.mean(0)
        v = told["beta2"] * v + (1 - told["beta2"]) * (g * g).mean(0)
        m_hat, v_hat = m / (1 - told["beta1"] ** t), v / (1 - told["beta2"] ** t)
        x = x - told["gamma"](t) * (
            told["weight_decay"] * x + m_hat / (np.sqrt(v_hat) + told["eta"])
        )
        yield x


VARIANTS = [
    (QuantizedVarianceAdam, {}),
    (LazyVarianceAdam, {"tau": 4}),
    (LazyVarianceAdam, {"tau": 4, "steps_with": "average"}),
]
