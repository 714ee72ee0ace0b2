"""An optimizer whose rank 2 differs from the others."""

import torch

import onebit


def differing(communicator, change):
    params = [("a", torch.nn.Parameter(torch.ones(3))), ("b", torch.nn.Parameter(torch.ones(4, 2)))]
    options = {"lr": 0.1}
    if communicator.rank == 2:
        params, options = change(params, options)
    optimizer = onebit.OneBitAdam(params, warmup=3, communicator=communicator, **options)
    for _, p in params:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
