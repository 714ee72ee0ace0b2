"""Runs of LAMB and 1-bit LAMB with the numbers that they keep beside Adam's state."""

from itertools import islice

import numpy as np
import torch

from helpers.reference_runs import OFFSETS, assert_equals_reference, joined, train
from onebit.comm import run_threads

TENSORS = [slice(a, b) for a, b in zip(OFFSETS, OFFSETS[1:])]
NUMBERS = {"c": "coefficient", "c_avg": "coefficient_average", "r": "ratio", "scaling": "scaling"}
BOUNDS = (0.1, 2.0)  # wide enough for some tensors to lie inside


def lamb_state(optimizer, params):
    """The state that LAMB has beside Adam's."""
    state = optimizer.state
    found = {
        letter: np.array([float(state[p][name]) for p in params])
        for letter, name in NUMBERS.items()
        if name in state[params[0]]
    }
    return found | (
        {"v_fresh": joined([state[p]["exp_avg_sq_fresh"] for p in params])}
        if "exp_avg_sq_fresh" in state[params[0]]
        else {}
    )


def assert_all_equal_reference(history, generator, frozen_at=None):
    """`assert_equals_reference`, and LAMB's own state.

    V and v_fresh take over at the end of step T_w here, after it in the reference.
    """
    expected = list(islice(generator, len(history[0])))
    assert_equals_reference(history, expected, corrected_at=frozen_at)
    for steps in history:
        for t, (state, letters) in enumerate(zip(steps, expected), start=1):
            for name in set(state) & {"c", "c_avg", "r", "scaling", "v_fresh"} - (
                {"scaling", "v_fresh"} if t == frozen_at else set()
            ):
                np.testing.assert_allclose(
                    state[name],
                    getattr(letters, name),
                    rtol=1e-9,
                    atol=1e-12,
                    err_msg=f"{name} of step {t}",
                )


def histories(ranks, kind, options, dtype=torch.float32):
    return run_threads(ranks, lambda c: train(c, kind, options, dtype=dtype))


def assert_same_bits(ours, theirs):
    for own, other in zip(ours, theirs, strict=True):
        for a, b in zip(own, other, strict=True):
            assert a.keys() >= {"x", "m", "v"}
            for name in a.keys() & b.keys():
                np.testing.assert_array_equal(a[name], b[name])


def numbers(run, name):
    return [float(run.optimizer.state[p][name]) for p in run.params]
