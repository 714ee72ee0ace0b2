"""Networks on one machine: clusters of hosts that are namespaces, or stand-ins without root.

    with cluster(hosts=4, rate_mbit=100) as hosts:
        hosts.run(["python", "script.py"])        a rank on every host, with torchrun's variables
        hosts.run_mpi(["python", "script.py"])    the same by Open MPI

`hosts` makes and removes them, `launch` starts ranks in them, `checks` refuses results that the
wire cannot have carried, and `stand_ins` has communicators that are slow, or need no network.
"""

from onebit.lab.bench.network.checks import least_seconds, require_carried, require_possible
from onebit.lab.bench.network.hosts import (
    Cluster,
    burst,
    cluster,
    link,
    remove_leftovers,
    tool_path,
    why_not,
)
from onebit.lab.bench.network.stand_ins import Absent, Delayed, replay

ENDS = 2  # of a link

__all__ = [
    "ENDS",
    "Absent",
    "Cluster",
    "Delayed",
    "burst",
    "cluster",
    "least_seconds",
    "link",
    "remove_leftovers",
    "replay",
    "require_carried",
    "require_possible",
    "tool_path",
    "why_not",
]
