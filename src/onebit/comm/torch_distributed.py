"""Ranks as the processes of a torch.distributed group: gloo on CPUs, NCCL on GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.comm.base import Communicator

FIRST_TAG = 2**30  # of this package's messages over gloo; tags have 31 bits


class TorchDistributed(Communicator):
    """The ranks of a torch.distributed group; `rank` is the rank in the group.

    gloo takes tensors on the CPU and NCCL on the GPU; others are copied there and back. A group
    with both, which `init_process_group()` without a backend makes, takes them where they are. The
    time-out is the group's own: `init_process_group(timeout=)` or `new_group(timeout=)`.

    Args:
        group: by default torch.distributed's default group.
        ordered: see `Communicator`; by default true, except for a group with NCCL alone.

    Raises RuntimeError if torch.distributed is not initialised, or for NCCL without a GPU, and
    ValueError if this process is not in the group.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, ordered: bool | None = None):
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has no process group. Launch with `torchrun --nproc-per-node 4 "
                'script.py` and call torch.distributed.init_process_group("gloo") first ("nccl" on '
                "GPUs). onebit.comm.Single() is one worker without a group."
            )
        default: Any = dist.group.WORLD
        self.group: dist.ProcessGroup = default if group is None else group
        self._owns_group = False
        rank = dist.get_rank(self.group)
        if rank < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not in this process group. Make the "
                "communicator, and what uses it, on the group's members only, or give each process "
                "the group that it belongs to."
            )
        device = _device(self.group)
        if ordered is None:
            ordered = device is None or device.type == "cpu"
        super().__init__(rank, dist.get_world_size(self.group), device, ordered)

    def duplicate(self) -> "TorchDistributed":
        """On a new process group with the same ranks, backends and time-out."""
        ranks = dist.get_process_group_ranks(self.group)
        backends = str(dist.get_backend_config(self.group))
        timeout = self.group._get_backend(self.device or torch.device("cpu")).options._timeout
        group = dist.new_group(ranks, timeout, backends, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        duplicate = TorchDistributed(group, self.ordered)
        duplicate._owns_group = True
        return duplicate

    def close(self) -> None:
        """Destroy the process group that `duplicate` made."""
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            if self.group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(self.group)

    def _all_to_all(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        with self._explained("all_to_all"):
            if x.is_cuda:
                dist.all_to_all_single(result, x, group=self.group)
            else:
                self._exchange(list(x), result, tag=2 * x[0].nbytes)
        return result

    def _all_gather(self, x: Tensor) -> Tensor:
        result = x.new_empty(self.size, len(x))
        with self._explained("all_gather"):
            if x.is_cuda:
                # all_gather_single is the newer name; where it exists, the older one warns.
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                gather(result.view(-1), x, group=self.group)
            else:
                self._exchange([x] * self.size, result, tag=2 * x.nbytes + 1)
        return result

    def _exchange(self, sent: list[Tensor], received: Tensor, tag: int) -> None:
        """Send sent[j] to rank j and receive row i from rank i, all at the same time.

        gloo's own all_to_all and all_gather do not fill both directions of a link: over links of
        50 Mbit/s to 1 Gbit/s they took 1.3 to 1.9 times the wire's time where this takes 1.0 to
        1.3. Messages meet by tag. It tells lengths and collectives apart, so that ranks in
        different ones wait for the time-out instead of reading each other's bytes, and it lies
        where a user's own messages have none.
        """
        tag = FIRST_TAG + tag % FIRST_TAG
        received[self.rank] = sent[self.rank]
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works += [
                dist.irecv(received[source], group=self.group, tag=tag, group_src=source),
                dist.isend(sent[target], group=self.group, tag=tag, group_dst=target),
            ]
        for work in works:
            work.wait()

    def _all_reduce(self, x: Tensor) -> Tensor:
        with self._explained("all_reduce"):
            dist.all_reduce(x, group=self.group)
        return x

    @contextmanager
    def _explained(self, collective: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{collective} failed on rank {self.rank} of {self.size}: {error}\nAnother rank "
                "failed, or did not enter the same collective within the group's time-out. Look "
                "for the first error in the ranks' logs, and for a branch that only some ranks "
                "take."
            ) from error


def _device(group: "dist.ProcessGroup") -> torch.device | None:
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if backends.get("cuda") != "nccl":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "The NCCL backend needs a GPU, and this process sees none (torch.cuda.is_available() "
            'is False). Use init_process_group("gloo") on CPUs.'
        )
    if "cpu" in backends:
        return None
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
