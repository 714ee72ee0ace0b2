"""Run a function on W ranks: in threads, on gloo processes, on the ranks of mpirun.

A hang is a failure.

    results = BACKENDS["gloo"](3, fn, *args, timeout=60)  # fn(communicator, *args) on each rank

The results come in the order of the ranks. The first error of any rank is raised here, with that
rank's traceback as a note. For processes `fn` must be a function at the top of a module in tests/.

Processes stay for the next call, because each takes seconds of CPU to start: a function must leave
its process as it found it. After an error, and with `fresh=True`, they end.
"""

import functools

import onebit.comm
from helpers.gloo_ranks import GlooRanks
from helpers.mpi_ranks import MpiRanks

# How long the outcome of a call is waited for, in seconds: long, for machines that are busy.
PATIENCE = 240
# How long a rank of the processes waits in a collective: shorter than the launchers' own time-outs.
COLLECTIVE_TIMEOUT = 60
MPI_RANKS = 4


def run_threads(size, fn, *args, timeout=PATIENCE):
    return onebit.comm.run_threads(size, functools.partial(_called_with, fn, args), timeout)


def run_gloo(size, fn, *args, timeout=PATIENCE, collective_timeout=COLLECTIVE_TIMEOUT, fresh=False):
    """On `size` processes of a gloo group, which is the default group of torch.distributed."""
    return _run(GlooRanks, size, (size, fn, args), timeout, collective_timeout, fresh)


def run_mpi(size, fn, *args, timeout=PATIENCE, collective_timeout=COLLECTIVE_TIMEOUT, fresh=False):
    """On the first `size` of 4 processes under the mpirun of this environment."""
    return _run(
        MpiRanks, max(size, MPI_RANKS), (size, fn, args), timeout, collective_timeout, fresh
    )


BACKENDS = {"threads": run_threads, "gloo": run_gloo, "mpi": run_mpi}
_kept = {}


def _run(kind, processes, job, timeout, collective_timeout, fresh):
    key = kind, processes, collective_timeout
    ranks = None if fresh else _kept.pop(key, None)
    ranks = ranks or kind(processes, collective_timeout)
    try:
        results = ranks.run(*job, timeout)
    except BaseException:
        ranks.close()
        raise
    if fresh or collective_timeout != COLLECTIVE_TIMEOUT:
        ranks.close()
    else:
        _kept[key] = ranks
    return results


def _called_with(fn, args, communicator):
    return fn(communicator, *args)
