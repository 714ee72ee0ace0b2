"""For a training loop that has a DistributedDataParallel model and would rather keep it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onebit.comm import Communicator, TorchDistributed
from onebit.optim.agreement import remember_names
from onebit.optim.optimizer import DistributedOptimizer


def attach(
    ddp_model: DistributedDataParallel | torch.nn.Module, optimizer: DistributedOptimizer
) -> None:
    """Leave all averaging to the optimizer: from now on DistributedDataParallel's gradients are
    each rank's own.

    Call it once, before the first backward; without it gradients are averaged twice.
    DistributedDataParallel still broadcasts rank 0's parameters when it is made and its buffers,
    such as BatchNorm's statistics, at each forward. With find_unused_parameters=True it also
    exchanges 4 bytes a parameter, by which it knows which to leave alone. `no_sync`,
    gradient_as_bucket_view and static_graph work as before; `no_sync` saves copies only.

    Its all-reduce would be right in the warm-up, where the average is exact, and yet it is off
    there too. A hook is registered once and cannot know, at backward, which phase the step will be
    in; with averaged gradients the optimizer would count bytes that it did not send; and the
    optimizer's own exact average has the same bits on every backend.

    `join()` does not help with uneven inputs, since it does not know of the optimizer's exchange: a
    rank that has run out of data must still call optimizer.step(), which takes gradients that are
    None for zero.

    Args:
        ddp_model: a torch.nn.parallel.DistributedDataParallel, perhaps compiled.
        optimizer: one of onebit's, which has all parameters of the model that require a gradient,
            on the ranks of its process group.

    Raises TypeError, ValueError or RuntimeError, before anything has changed, if the two do not
    belong together.
    """
    ddp_model = getattr(ddp_model, "_orig_mod", ddp_model)  # what torch.compile has wrapped
    _check_kinds(ddp_model, optimizer)
    _check_ranks(ddp_model.process_group, optimizer.communicator)
    _check_parameters(ddp_model, optimizer)
    remember_names(ddp_model.module)
    try:
        ddp_model.register_comm_hook(None, keep_local)
    except RuntimeError as error:
        raise RuntimeError(
            "this DistributedDataParallel has a communication hook already, and takes only one: "
            "attach a new one to the optimizer, DistributedDataParallel(ddp_model.module), which "
            "has none"
        ) from error


def keep_local(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: a bucket of gradients stays as this rank has computed it."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _check_kinds(ddp_model: object, optimizer: object) -> None:
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"attach takes a DistributedDataParallel, not {type(ddp_model).__name__}: a model "
            "without it needs no attach, call onebit.broadcast_parameters(model) instead"
        )
    if not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"attach takes an optimizer of onebit's, not {type(optimizer).__name__}: nobody would "
            "average the gradients. Give the optimizer itself if something has wrapped it"
        )
    if optimizer.overlap:
        raise ValueError(
            "DistributedDataParallel writes the gradients anew at the end of backward, when the "
            "optimizer's buckets have left: set overlap=False; or train the model without "
            "DistributedDataParallel and call onebit.broadcast_parameters(model)"
        )


def _check_ranks(group: dist.ProcessGroup, communicator: Communicator) -> None:
    """Both must average over the same processes."""
    if isinstance(communicator, TorchDistributed):
        theirs, ours = (dist.get_process_group_ranks(g) for g in (group, communicator.group))
    else:
        theirs, ours = (
            (dist.get_rank(group), dist.get_world_size(group)),
            (communicator.rank, communicator.size),
        )
    if theirs != ours:
        raise ValueError(
            f"the model's process group has ranks {theirs}, the optimizer's communicator {ours}: "
            "make the optimizer with "
            "communicator=onebit.comm.TorchDistributed(ddp_model.process_group)"
        )


def _check_parameters(ddp_model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in ddp_model.module.named_parameters():
        if p.requires_grad and p not in known and name not in ddp_model.parameters_to_ignore:
            raise ValueError(
                f"the optimizer does not have {name}, whose gradient nobody would average: give it "
                "to the optimizer, with compress=False if it is not to be compressed; or set its "
                "requires_grad to False"
            )
