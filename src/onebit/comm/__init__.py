"""Communication between ranks: `Communicator` and its backends, which give the same bytes.

They know nothing of compression. Each counts its traffic: bytes_sent, bytes_received, calls.
"""

import torch.distributed as dist

from onebit.comm.base import Communicator, Single, launched_processes
from onebit.comm.mpi import Mpi, abort_on_error
from onebit.comm.threads import run_threads
from onebit.comm.torch_distributed import TorchDistributed

__all__ = [
    "Communicator",
    "Mpi",
    "Single",
    "TorchDistributed",
    "abort_on_error",
    "default_communicator",
    "run_threads",
]


def default_communicator() -> Communicator:
    """torch.distributed's default group if there is one, else a single worker.

    Raises RuntimeError if a launcher has started several processes and nothing connects them: each
    would train a model of its own.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchDistributed()
    launched = launched_processes()
    if launched:
        raise RuntimeError(
            f"{launched[0]}={launched[1]}, but there is no process group: {launched[1]} processes "
            "would train separate models. Call torch.distributed.init_process_group(...) first, or "
            "pass communicator=onebit.comm.Mpi() under mpirun or srun. "
            "communicator=onebit.comm.Single() asks for one worker on purpose."
        )
    return Single()
