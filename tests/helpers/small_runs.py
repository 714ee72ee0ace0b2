"""A few small parameters with an optimizer: steps on random gradients, copies of all state, saving
and resuming.
"""

import io
from collections import namedtuple

import torch

import onebit

Run = namedtuple("Run", "params optimizer")


def make(
    communicator, kind=onebit.OneBitAdam, shapes=((4, 5), (9,)), dtype=torch.float32, **options
):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    return Run(params, kind(params, communicator=communicator, **options))


def step(run, t, rank, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * t + rank)
    for p in run.params:
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype)
    run.optimizer.step()


def everything(run):
    """All that a step may change, copied."""
    state = [
        v.clone()
        for entries in run.optimizer.state_dict()["state"].values()
        for v in entries.values()
    ]
    return [p.detach().clone() for p in run.params] + state


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SMALL_SHAPES = ((70,), (9, 15), (0, 4))


def saved(optimizer):
    """A state_dict that has been through torch.save, read by the safe loader."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed(communicator, params, state, **options):
    run = make(communicator, shapes=SMALL_SHAPES, **options)
    with torch.no_grad():
        for p, value in zip(run.params, params):
            p.copy_(value)
    run.optimizer.load_state_dict(state)
    return run


def torch_state(kind, **options):
    params = [torch.nn.Parameter(torch.ones(s)) for s in ((4, 5), (9,))]
    optimizer = kind(params, lr=0.3, **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    return optimizer.state_dict()
