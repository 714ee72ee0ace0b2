"""Two ways to average a vector over the ranks, with one contract: allreduce(flat) -> mean. Errors stay inside."""

import torch

from .compression import Sign
from .kernels.torch_ops import mean_in_rank_order


class ExactAllreduce:
    """The mean over the ranks, uncompressed: 2 (W - 1) / W of the vector leaves each rank.

    Args:
        communicator: see `onebit.comm`.
        wire_dtype: the type that elements travel in; None: their own.
    """

    def __init__(self, communicator, wire_dtype=None):
        self.communicator = communicator
        self.wire_dtype = wire_dtype

    def allreduce(self, x):
        return self.communicator.all_reduce(x, wire_dtype=self.wire_dtype)


class CompressedAllreduce:
    """The error-compensated compressed mean: lines 7 to 11 of Algorithm 1, each rank being the server of one chunk.

        z_hat_i = C[z_i + delta_i]                        delta_i   <- z_i + delta_i - z_hat_i
        z_bar   = C[mean_i z_hat_i + delta_bar]           delta_bar <- mean_i z_hat_i + delta_bar - z_bar

    One all_to_all and one all_gather, whatever the number of tensors: scales travel inside the messages. What is lost is kept:
    over any number of calls, sum of outputs = sum of mean inputs + errors at the start - errors at the end, where "errors" is
    mean_i delta_i + delta_bar.

    Args:
        communicator: see `onebit.comm`.
        layout: `onebit.layout.Layout` of the vector.
        compressor: class or callable (partition, dtype) -> Compressor.
        active: bool [layout.size], which elements take part; None: all but padding. The others are averaged to 0.
        worker_error: float [layout.size], delta_i of this rank.
        server_error: float [layout.chunk], the part of delta_bar that this rank serves.
    """

    def __init__(self, communicator, layout, worker_error, server_error, compressor=Sign, active=None):
        self.communicator = communicator
        self.layout = layout
        self.worker_error = worker_error
        self.server_error = server_error
        self.active = layout.real if active is None else active
        self.worker = compressor(layout.worker_partition(self.active), worker_error.dtype)
        self.server = compressor(layout.server_partition(communicator.rank, self.active), worker_error.dtype)

    def allreduce(self, z):
        """float [layout.size] -> its compressed mean, a new vector, the same bits on every rank."""
        compensated = torch.where(self.active, z + self.worker_error, 0)
        payload = self.worker.compress(compensated)                                      # line 7
        torch.sub(compensated, self.worker.decompress(payload), out=self.worker_error)
        received = self.communicator.all_to_all(payload)                                 # line 8
        chunks = self.server.decompress(received[:, None])
        average = mean_in_rank_order(chunks) + self.server_error                         # line 9
        payload = self.server.compress(average)                                          # line 10
        torch.sub(average, self.server.decompress(payload), out=self.server_error)
        gathered = self.communicator.all_gather(payload[0])                              # line 11
        return self.worker.decompress(gathered)

    def total_error(self):
        """mean_i delta_i + delta_bar, float [layout.size], by one exact all_reduce."""
        error = self.worker_error.clone()
        error[self.layout.chunk_of(self.communicator.rank)] += self.communicator.size * self.server_error
        return self.communicator.all_reduce(error)
