import torch

from onebit.comm import default_communicator
from onebit.optim.agreement import check_same_on_all_ranks


@torch.no_grad()
def broadcast_parameters(model, communicator=None):
    """Give every rank rank 0's parameters and buffers. All ranks must call it, with models of the same structure.

    Nobody else does this without a DistributedDataParallel wrapper. At most 2 (W - 1) / W of the model leaves a rank, one tensor at
    a time.

    Args:
        model: a torch.nn.Module, perhaps compiled.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single worker.

    Raises RuntimeError on all ranks, naming the first difference, if the models differ in structure.
    """
    communicator = default_communicator() if communicator is None else communicator
    model = getattr(model, "_orig_mod", model)  # without torch.compile's wrapper, for its names
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return
    lines = [f"{name}: shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors]
    check_same_on_all_ranks(
        communicator, lines, tensors[0][1].device, "Build the same model on every rank"
    )
    for _, tensor in tensors:
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        tensor.copy_(_from_rank_0(communicator, data).view(tensor.dtype).view(tensor.shape))


def _from_rank_0(communicator, data):
    """uint8 [k] of rank 0 on every rank: an all_to_all gives each rank a part of it, an all_gather joins the parts."""
    size = communicator.size
    parts = data.new_zeros(size, -(-len(data) // size))
    if communicator.rank == 0:
        parts.flatten()[: len(data)] = data
    return communicator.all_gather(communicator.all_to_all(parts)[0]).flatten()[: len(data)].clone()
