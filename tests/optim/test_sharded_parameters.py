"""Sharded parameters are refused with the reason."""

import pytest
import torch
from helpers.launch import run_gloo
from helpers.optimizer_kinds import KINDS
from helpers.refusals import matches, refusal


def sharded(communicator):
    """What a user of each kind of sharding would give to the optimizer: a message for each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (communicator.size,))
    cpu = torch.device("cpu")
    of_deepspeed = torch.nn.Parameter(torch.ones(2))
    of_deepspeed.ds_id = 0  # DeepSpeed ZeRO-3 leaves this mark on what it has sharded
    params = {
        "DTensor": [torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))],
        "fully_shard": fully_shard(torch.nn.Linear(4, 4), mesh=mesh).parameters(),
        "FullyShardedDataParallel": FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=cpu
        ).parameters(),
        "FullyShardedDataParallel's": FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=cpu, use_orig_params=True
        ).parameters(),
        "DeepSpeed ZeRO-3": [of_deepspeed],
    }
    params = {name: list(tensors) for name, tensors in params.items()}
    return [
        (name, refusal(kind, tensors, **options))
        for name, tensors in params.items()
        for kind, options in KINDS
    ]


@pytest.mark.report("R03")
def test_sharded_parameters_are_refused_with_the_reason():
    for found in run_gloo(2, sharded):
        assert [
            name
            for name, text in found
            if not matches(
                text, f"ValueError: .*{name}.*each rank holds only a shard.*onebit.ddp.attach"
            )
        ] == []
        assert len(found) == 5 * len(KINDS)
