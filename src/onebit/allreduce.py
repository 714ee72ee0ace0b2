"""Two ways to average a vector over the ranks, with one contract: allreduce(flat) -> mean; flat may be overwritten. Errors stay inside."""

import numpy as np
import torch

from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms

PIECE = (
    24 * 2**20
)  # bytes; buffers of 32 MB and more are new memory to glibc each time, which costs more than to fill them


class ExactAllreduce:
    """The mean over the ranks, uncompressed: 2 (W - 1) / W of the vector leaves each rank. It travels in pieces and takes the vector's place.

    Args:
        communicator: see `onebit.comm`.
        wire_dtype: the type that elements travel in; None: their own.
    """

    def __init__(self, communicator, wire_dtype=None):
        self.communicator = communicator
        self.wire_dtype = wire_dtype

    def allreduce(self, x):
        for piece in x.split(PIECE // x.itemsize):
            piece.copy_(self.communicator.all_reduce(piece, wire_dtype=self.wire_dtype))
        return x


class CompressedAllreduce:
    """The error-compensated compressed mean: lines 7 to 11 of Algorithm 1, each rank being the server of one chunk.

        z_hat_i = C[z_i + delta_i]                        delta_i   <- z_i + delta_i - z_hat_i
        z_bar   = C[mean_i z_hat_i + delta_bar]           delta_bar <- mean_i z_hat_i + delta_bar - z_bar

    One all_to_all and one all_gather, whatever the number of tensors: scales travel inside the messages. What is lost is kept:
    over any number of calls, sum of outputs = sum of mean inputs + errors at the start - errors at the end, where "errors" is
    mean_i delta_i + delta_bar.

    `allreduce` is `compress`, `exchange`, `commit` and `decode` in a row; whoever can use the payload as it is calls them one by one.

    Args:
        communicator: see `onebit.comm`.
        layout: `onebit.layout.Layout` of the vector.
        dtype: float32 or float64, of the vector.
        compressor: class or callable (partition, dtype) -> Compressor.
        active: bool [layout.size], which elements take part; None: all but padding. The others are averaged to 0.
        in_place: False: a round that is not committed leaves the errors as they were; costs memory for both once more.
        feedback: False: what is lost is forgotten, for a compressor that is right on average; the errors stay zero.
        rounds: how many have been committed. A compressor that draws lots draws them anew for each rank, round, and side, worker or server,
            as a function of its seed and these alone: whoever goes on from a round goes on with its lots.
        stream: sets the lots apart from those of this rank's other allreduces.
    """

    def __init__(
        self,
        communicator,
        layout,
        dtype=torch.float32,
        compressor=Sign,
        active=None,
        in_place=True,
        feedback=True,
        rounds=0,
        stream=0,
    ):
        self.communicator = communicator
        self.layout = layout
        self.rounds = rounds
        self._feedback = feedback
        self._stream = stream
        in_place = in_place and feedback
        self.compressor = compressor(layout.worker_partition(active), dtype)
        self.partition = self.compressor.partition
        self._worker = self.compressor.with_feedback(in_place)
        self._server = compressor(
            layout.server_partition(communicator.rank, self.partition), dtype
        ).with_feedback(in_place)

    @property
    def worker_error(self):
        """delta_i of this rank, float [layout.size]. Computed on demand; may be assigned."""
        return self._worker.error

    @worker_error.setter
    def worker_error(self, value):
        self._worker.error = value

    @property
    def server_error(self):
        """The part of delta_bar that this rank serves, float [layout.chunk]. Computed on demand; may be assigned."""
        return self._server.error

    @server_error.setter
    def server_error(self, value):
        self._server.error = value

    def allreduce(self, z):
        """float [layout.size] -> its compressed mean, a new vector, the same bits on every rank."""
        gathered = self.exchange(
            self.compress(Terms(self.layout.views(z), [1.0] * len(self.layout.shapes)))
        )
        self.commit()
        return self.decode(gathered)

    def compress(self, terms):
        """Line 7: z_i, given as `Terms`, compressed: uint8 [W, row_bytes], row j for rank j."""
        return self._worker.compress(terms, self._lots(side=0))

    def exchange(self, payload):
        """Lines 8 to 11: the compressed mean z_bar, uint8 [W, row_bytes], the same on every rank."""
        received = self.communicator.all_to_all(payload)  # line 8
        payload = self._server.average(received, self._lots(side=1))  # lines 9 and 10
        return self.communicator.all_gather(payload[0])  # line 11

    def commit(self):
        """The errors of the last round become the errors that the next one adds."""
        self.rounds += 1
        if self._feedback:
            self._worker.commit()
            self._server.commit()

    def decode(self, gathered):
        """What `exchange` returned -> z_bar, float [layout.size]."""
        return self.compressor.decompress(gathered)

    def total_error(self):
        """mean_i delta_i + delta_bar, float [layout.size], by one exact all_reduce."""
        error = self.worker_error.clone()
        error[self.layout.chunk_of(self.communicator.rank)] += (
            self.communicator.size * self.server_error
        )
        return self.communicator.all_reduce(error)

    def _lots(self, side):
        """What this round's lots are drawn from; None for a compressor that draws none."""
        seed = self.compressor.seed
        if seed is None:
            return None
        place = np.random.SeedSequence(
            [seed, self._stream, self.rounds, self.communicator.rank, side]
        )
        return torch.Generator(self.partition.mask.device).manual_seed(
            int(place.generate_state(1, np.uint64)[0])
        )
