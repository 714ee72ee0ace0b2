"""The model that is evaluated: the mean of the workers' models."""

import copy
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor, nn

from onebit.comm import Communicator


@torch.no_grad()
def mean_model(model: nn.Module, communicator: Communicator) -> nn.Module | None:
    """A copy of the model that holds the exact mean over the ranks, on rank 0; None on the others.

    The mean is taken of all parameters and floating-point buffers, so also of the running
    statistics of BatchNorm, of which each worker has its own. The ranks' models do not change, so
    that evaluation does not change the training. All ranks must call it.
    """
    averaged = copy.deepcopy(model) if communicator.rank == 0 else None
    taken = _floating(averaged) if averaged is not None else None
    for dtype, tensors in groupby(_floating(model), key=lambda tensor: tensor.dtype):
        tensors = list(tensors)
        wide = torch.promote_types(dtype, torch.float32)
        mean = communicator.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]).to(wide))
        for part, tensor in zip(
            mean.split([tensor.numel() for tensor in tensors]), tensors, strict=True
        ):
            if taken is not None:
                next(taken).copy_(part.view_as(tensor))
    return averaged


def _floating(model: nn.Module) -> Iterator[Tensor]:
    return (
        tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()
    )
