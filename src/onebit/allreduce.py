"""Two ways to average a vector over the ranks, with one contract: allreduce(flat) -> mean.

`flat` may be overwritten. Compression errors stay inside the object.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Generator, Tensor

from onebit.comm import Communicator
from onebit.compression import Compressor, Sign
from onebit.kernels.torch_ops import Terms
from onebit.layout import Layout, Partition

# Bytes of one all_reduce. glibc returns buffers of 32 MB and more to the system, and to get fresh
# memory each time costs more than to fill it.
PIECE = 24 * 2**20


class ExactAllreduce:
    """The uncompressed mean over the ranks, which takes the place of the vector.

    2 (W - 1) / W of the vector's bytes leave each rank. It travels in pieces.

    Args:
        communicator: see `onebit.comm`.
        wire_dtype: the type that elements travel in; by default their own.
    """

    def __init__(self, communicator: Communicator, wire_dtype: torch.dtype | None = None):
        self.communicator = communicator
        self.wire_dtype = wire_dtype

    def allreduce(self, x: Tensor) -> Tensor:
        """The mean of x over the ranks, in x itself."""
        for piece in x.split(PIECE // x.itemsize):
            piece.copy_(self.communicator.all_reduce(piece, wire_dtype=self.wire_dtype))
        return x


class CompressedAllreduce:
    """The compressed mean with error feedback: lines 7 to 11 of Algorithm 1 in "1-bit Adam".

        z_hat_i = C[z_i + delta_i]                 delta_i   <- z_i + delta_i - z_hat_i
        z_bar   = C[mean_i z_hat_i + delta_bar]    delta_bar <- mean_i z_hat_i + delta_bar - z_bar

    Each rank is the server of one chunk of the vector. The average takes one all_to_all and one
    all_gather, whatever the number of tensors, because the scales travel inside the messages.
    Nothing is lost: over any number of calls, sum of outputs = sum of mean inputs + errors at the
    start - errors at the end, where "errors" is mean_i delta_i + delta_bar.

    `allreduce` is `compress`, `exchange`, `commit` and `decode` in a row. Call these one by one to
    use the payload as it is.

    Args:
        communicator: see `onebit.comm`.
        layout: of the vector.
        dtype: float32 or float64, of the vector.
        compressor: a `Compressor` class, or a callable (partition, dtype) -> Compressor.
        active: bool [layout.size], which elements take part, by default all but padding. The others
            are averaged to 0.
        in_place: False: a round that is not committed leaves the errors as they were. This needs
            memory for both errors once more.
        feedback: False: what is lost is forgotten, which suits an unbiased compressor. The errors
            stay zero.
        rounds: how many rounds have been committed before. The random draws of a stochastic
            compressor are a function of (seed, stream, round, rank, side), where the side is worker
            or server. To resume a run exactly, pass the number of its rounds.
        stream: separates the random draws from those of this rank's other allreduces.
        check_scales: whether scales that are negative or not finite are an error.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        dtype: torch.dtype = torch.float32,
        compressor: Callable[[Partition, torch.dtype], Compressor] = Sign,
        active: Tensor | None = None,
        in_place: bool = True,
        feedback: bool = True,
        rounds: int = 0,
        stream: int = 0,
        check_scales: bool = True,
    ):
        self.communicator = communicator
        self.layout = layout
        self.rounds = rounds
        self._feedback = feedback
        self._stream = stream
        self._check_scales = check_scales
        in_place = in_place and feedback
        self.compressor = compressor(layout.worker_partition(active), dtype)
        self.partition = self.compressor.partition
        self._worker = self.compressor.with_feedback(in_place)
        self._server_compressor = compressor(
            layout.server_partition(communicator.rank, self.partition), dtype
        )
        self._server = self._server_compressor.with_feedback(in_place)

    @property
    def worker_error(self) -> Tensor:
        """delta_i of this rank, float [layout.size], computed on demand. It may be assigned."""
        return self._worker.error

    @worker_error.setter
    def worker_error(self, value: Tensor) -> None:
        self._worker.error = value

    @property
    def server_error(self) -> Tensor:
        """The chunk of delta_bar that this rank serves, float [layout.chunk], computed on demand.

        It may be assigned.
        """
        return self._server.error

    @server_error.setter
    def server_error(self, value: Tensor) -> None:
        self._server.error = value

    def allreduce(self, z: Tensor) -> Tensor:
        """float [layout.size] -> its compressed mean, a new vector, the same bits on every rank."""
        gathered = self.exchange(self.compress(Terms(self.layout.views(z))))
        self.commit()
        return self.decode(gathered)

    def compress(self, terms: Terms) -> Tensor:
        """Line 7: z_i, given as `Terms`, compressed: uint8 [W, row_bytes], row j for rank j."""
        return self._worker.compress(terms, self._generator(side=0))

    def exchange(self, payload: Tensor) -> Tensor:
        """Lines 8 to 11: the compressed mean z_bar, uint8 [W, row_bytes], equal on every rank."""
        received = self.communicator.all_to_all(payload)  # line 8
        payload = self._server.average(received, self._generator(side=1))  # lines 9 and 10
        gathered = self.communicator.all_gather(payload[0])  # line 11
        if self._check_scales:
            self._check(received, gathered)
        return gathered

    def _check(self, received: Tensor, gathered: Tensor) -> None:
        """Raise RuntimeError unless the scales of both messages are finite and at least 0.

        One look after both collectives, so that a rank which fails leaves none waiting in this
        round. A server's scales follow from all workers', so that all ranks see what is not finite.
        """
        own = self._server_compressor.scales(received[:, None])
        scales = self.compressor.scales(gathered)
        if own is None or scales is None:
            return
        sound = [((x >= 0) & (x < math.inf)).all() for x in (own, scales)]
        if not bool(sound[0] & sound[1]):
            raise RuntimeError(
                "the ranks have exchanged scales that are negative or not finite: a message was "
                "altered on its way, or a gradient is not finite and check_finite is False. "
                "Nothing of it was applied: end the job, and resume from the last checkpoint"
            )

    def commit(self) -> None:
        """The errors of the last round become the errors that the next one adds."""
        self.rounds += 1
        if self._feedback:
            self._worker.commit()
            self._server.commit()

    def decode(self, gathered: Tensor) -> Tensor:
        """What `exchange` returned -> z_bar, float [layout.size]."""
        return self.compressor.decompress(gathered)

    def total_error(self) -> Tensor:
        """mean_i delta_i + delta_bar, float [layout.size], by one exact all_reduce."""
        error = self.worker_error.clone()
        error[self.layout.chunk_of(self.communicator.rank)] += (
            self.communicator.size * self.server_error
        )
        return self.communicator.all_reduce(error)

    def _generator(self, side: int) -> Generator | None:
        """The source of this round's random draws; None for a deterministic compressor."""
        seed = self.compressor.seed
        if seed is None:
            return None
        place = np.random.SeedSequence(
            [seed, self._stream, self.rounds, self.communicator.rank, side]
        )
        return torch.Generator(self.partition.mask.device).manual_seed(
            int(place.generate_state(1, np.uint64)[0])
        )
