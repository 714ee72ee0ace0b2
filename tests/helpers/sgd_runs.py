"""Runs of SGD and its relatives that can be compared with `onebit.reference` at every step."""

import numpy as np
import torch

import onebit
from helpers.reference_runs import (
    NUMELS,
    STEPS,
    joined,
    learning_rate,
    local_gradient,
    server_error,
    split,
    start_values,
)

SGD_GROUPS = [  # two parameter groups with options of their own: tensors 0-2 and 3-5
    {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    {"lr": 3e-3, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0},
]
PLAIN = [{"lr": 1e-2, "weight_decay": 0.01}, {"lr": 3e-3, "weight_decay": 0.0}]
UNDECAYED = [{"lr": 1e-2}, {"lr": 3e-3}]
COMPRESSED = [(onebit.DoubleSqueeze, PLAIN), (onebit.EFMomentumSGD, SGD_GROUPS)]
ALL = [(onebit.DistributedSGD, SGD_GROUPS), *COMPRESSED, (onebit.LocalSGD, SGD_GROUPS)]


def train_sgd(
    communicator,
    kind,
    groups,
    options=None,
    steps=STEPS,
    dtype=torch.float64,
    gradient=local_gradient,
):
    """Run an optimizer on this rank.

    Return its state after each step, flattened to the reference's vectors.
    """
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    optimizer = kind(
        [dict(groups[0], params=params[:3]), dict(groups[1], params=params[3:])],
        communicator=communicator,
        **options or {},
    )
    history = []
    for t in range(1, steps + 1):
        for group, own in zip(optimizer.param_groups, groups):
            group["lr"] = learning_rate(own["lr"], t)
        for p, g in zip(params, split(gradient(t, joined(params), communicator.rank))):
            p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        history.append(sgd_snapshot(optimizer, params))
    return history


def sgd_snapshot(optimizer, params):
    state = {"x": joined(params)}
    entries = [optimizer.state[p] for p in params]
    if optimizer.vectors:
        state["m"] = joined([entry["momentum_buffer"] for entry in entries])
    if optimizer.compresses:
        state["delta"] = joined([entry["worker_error"] for entry in entries])
        state["server_error"] = entries[0]["server_error"].double().numpy().copy()
    return state


def sgd_reference_options(groups):
    """The groups' options for each coordinate."""
    options = {
        name: np.repeat([float(groups[0][name])] * 3 + [float(groups[1][name])] * 3, NUMELS)
        for name in groups[0]
    }
    lr = options.pop("lr")
    return options | {"gamma": lambda t: learning_rate(lr, t)}


def assert_equals_sgd_reference(history, generator):
    ranks = len(history)
    for t, expected in zip(range(len(history[0])), generator):
        for rank in range(ranks):
            close = dict(rtol=1e-9, atol=1e-12, err_msg=f"step {t + 1}, rank {rank}")
            for name in history[rank][t].keys() - {"server_error"}:
                value = getattr(expected, name)
                np.testing.assert_allclose(
                    history[rank][t][name], value[rank] if value.ndim == 2 else value, **close
                )
        if "delta" in history[0][t]:
            np.testing.assert_allclose(
                server_error(history, t, ranks), expected.delta_bar, rtol=1e-9, atol=1e-12
            )
