"""The same parameters on all ranks."""

import torch

from onebit.comm import Communicator, default_communicator
from onebit.optim.agreement import check_same_on_all_ranks, line, remember_names


@torch.no_grad()
def broadcast_parameters(model: torch.nn.Module, communicator: Communicator | None = None) -> None:
    """Give every rank rank 0's parameters and buffers.

    All ranks must call it, with models of the same structure. Nobody else does this without a
    DistributedDataParallel wrapper. At most 2 (W - 1) / W of the model leaves a rank, one tensor at
    a time.

    Args:
        model: the model itself, perhaps compiled, since its buffers are needed as well.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single
            worker.

    Raises TypeError if `model` is not a torch.nn.Module, and RuntimeError on all ranks, naming the
    first difference, if the models differ in structure.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"broadcast_parameters takes the model itself, not {type(model).__name__}: call "
            "onebit.broadcast_parameters(model), which sends its parameters and its buffers"
        )
    communicator = default_communicator() if communicator is None else communicator
    model = getattr(model, "_orig_mod", model)  # without torch.compile's wrapper, for its names
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return
    remember_names(model)
    check_same_on_all_ranks(
        communicator,
        [line(name, f"shape {tuple(x.shape)}", str(x.dtype)) for name, x in tensors],
        tensors[0][1].device,
        "Build the same model on every rank",
    )
    for _, tensor in tensors:
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        tensor.copy_(_from_rank_0(communicator, data).view(tensor.dtype).view(tensor.shape))


def _from_rank_0(communicator: Communicator, data: torch.Tensor) -> torch.Tensor:
    """uint8 [k] of rank 0 on every rank: an all_to_all gives each rank a part of it, and an
    all_gather joins the parts."""
    size = communicator.size
    parts = data.new_zeros(size, -(-len(data) // size))
    if communicator.rank == 0:
        parts.flatten()[: len(data)] = data
    return communicator.all_gather(communicator.all_to_all(parts)[0]).flatten()[: len(data)].clone()
