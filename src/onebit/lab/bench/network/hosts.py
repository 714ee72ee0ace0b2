"""Hosts on one machine: network namespaces, joined by links whose rate the kernel limits.

Two hosts are joined by one cable (veth). More have a switch between them, a bridge in a namespace
of its own. A token bucket (tbf) limits what leaves a host, and with a switch also what it receives.

Nothing stays behind. The namespaces are removed when the block ends, whatever happens in it, and
by SIGTERM and SIGHUP. After kill -9 the ranks die with their launcher, and the next cluster removes
its namespaces: their names tell which process made them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onebit.lab.bench.network import launch

PREFIX = "onebit"
INTERFACE = "veth-onebit"
ADDRESS = "10.77.0.{}"
MOST_HOSTS = 4
SMALLEST_BURST = 128 * 2**10  # bytes; the kernel hands over packets of up to 64 KB
TICKS = 250  # of the kernel's clock a second, between which a bucket is not filled
QUEUE = "100ms"  # a packet that would wait longer is dropped


def why_not() -> str | None:
    """Why there can be no cluster here, and the remedy; None if there can."""
    tools = [tool for tool in ("ip", "tc") if tool_path(tool) is None]
    if tools:
        return (
            f"a link needs {' and '.join(tools)}: install iproute2, "
            "or use --delay, an artificial delay"
        )
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return (
            "network namespaces need root: run as root, or use --delay, an artificial delay, "
            "where there is one"
        )
    return None


def burst(rate_mbit: float) -> int:
    """Bytes that may pass at full speed: what the rate lets pass between two ticks of the clock."""
    return max(SMALLEST_BURST, int(rate_mbit * 1e6 / 8 / TICKS))


@dataclass(frozen=True)
class Cluster:
    """Hosts that are up.

    Attributes:
        namespaces: of the hosts.
        interface: by which each reaches the others.
        rate_mbit: that it lets pass each way, megabits a second; None: as fast as the machine can.
        per_host: ranks on each host.
    """

    namespaces: tuple[str, ...]
    interface: str
    rate_mbit: float | None
    per_host: int = 1

    @property
    def ranks(self) -> int:
        """On all hosts together."""
        return len(self.namespaces) * self.per_host

    def run(self, command: list[str], timeout: float | None = None) -> None:
        """Run the command on all ranks at once, with the variables that torchrun sets.

        RuntimeError as soon as one fails, or after `timeout` seconds; then all are ended.
        """
        launch.run_ranks(self, command, timeout)

    def run_mpi(self, command: list[str], timeout: float | None = None) -> None:
        """The same as ranks of Open MPI."""
        launch.run_mpi(self, command, timeout)

    def sent(self) -> list[int]:
        """Bytes, headers included, that have left each host so far, by its interface's counter."""
        return [
            json.loads(_tool(f"ip -n {namespace} -s -j link show dev {self.interface}"))[0][
                "stats64"
            ]["tx"]["bytes"]
            for namespace in self.namespaces
        ]


@contextmanager
def cluster(hosts: int = 2, rate_mbit: float | None = None, per_host: int = 1) -> Iterator[Cluster]:
    """Hosts whose links let `rate_mbit` megabits a second pass each way, None for no limit.

    They are always removed, whatever happens inside.
    RuntimeError with the remedy if there can be none, ValueError for an impossible number of hosts.
    """
    if not 2 <= hosts <= MOST_HOSTS or per_host < 1:
        raise ValueError(
            f"a cluster has 2 to {MOST_HOSTS} hosts with at least one rank on each, not {hosts} "
            f"with {per_host}"
        )
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    remove_leftovers()
    name = f"{PREFIX}{os.getpid()}x{_start_time(os.getpid())}"
    namespaces = tuple(f"{name}-{i}" for i in range(1, hosts + 1))
    made = Cluster(namespaces, INTERFACE, rate_mbit, per_host)
    with _ended_in_order():
        try:
            _make(made, f"{name}-switch")
            yield made
        finally:
            _remove([*namespaces, f"{name}-switch"])


def link(rate_mbit: float) -> "contextmanager[Cluster]":
    """Two hosts, one rank on each."""
    return cluster(2, rate_mbit)


# ---- setting up


def _make(made: Cluster, switch: str) -> None:
    for namespace in made.namespaces:
        _tool(f"ip netns add {namespace}")
        _tool(f"ip -n {namespace} link set lo up")
    if len(made.namespaces) == 2:
        one, two = made.namespaces
        _tool(f"ip link add {INTERFACE} netns {one} type veth peer name {INTERFACE} netns {two}")
    else:
        _make_switch(made, switch)
    for i, namespace in enumerate(made.namespaces, 1):
        _tool(f"ip -n {namespace} addr add {ADDRESS.format(i)}/24 dev {INTERFACE}")
        _tool(f"ip -n {namespace} link set {INTERFACE} up")
        _limit(namespace, INTERFACE, made.rate_mbit)


def _make_switch(made: Cluster, switch: str) -> None:
    _tool(f"ip netns add {switch}")
    _tool(f"ip -n {switch} link add bridge type bridge")
    _tool(f"ip -n {switch} link set bridge up")
    for i, namespace in enumerate(made.namespaces, 1):
        port = f"port{i}"
        _tool(
            f"ip link add {INTERFACE} netns {namespace} type veth peer name {port} netns {switch}"
        )
        _tool(f"ip -n {switch} link set {port} master bridge up")
        _limit(switch, port, made.rate_mbit)


def _limit(namespace: str, interface: str, rate_mbit: float | None) -> None:
    if rate_mbit is not None:
        _tool(
            f"tc -n {namespace} qdisc replace dev {interface} root tbf "
            f"rate {rate_mbit}mbit burst {burst(rate_mbit)} latency {QUEUE}"
        )


def _tool(command: str) -> str:
    """What the command says; RuntimeError with the remedy if it fails."""
    tool, *arguments = command.split()
    done = subprocess.run([tool_path(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"`{command}` failed: {done.stderr.strip()}. A container needs NET_ADMIN and "
            "SYS_ADMIN; or use --delay, an artificial delay, where there is one"
        )
    return done.stdout


def tool_path(tool: str) -> str | None:
    """Not all users have the system's tools in their path."""
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


# ---- removing


def remove_leftovers() -> list[str]:
    """Remove the namespaces of launchers that are no more, such as after kill -9; their names."""
    names = [line.split()[0] for line in _tool("ip netns list").splitlines() if line.strip()]
    left = []
    for name in names:
        found = re.fullmatch(rf"{PREFIX}(\d+)x(\d+)-\w+", name)
        if found and _start_time(int(found[1])) != int(found[2]):
            left.append(name)
    _remove(left)
    return left


def _remove(namespaces: list[str]) -> None:
    """End what runs in them and delete them; an interface goes with its namespace."""
    for name in namespaces:
        listed = subprocess.run(
            [tool_path("ip"), "netns", "pids", name], capture_output=True, text=True
        )
        for pid in map(int, listed.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended meanwhile
        subprocess.run([tool_path("ip"), "netns", "del", name], capture_output=True)


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit inside, so that what is to be removed is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame) -> None:
    raise SystemExit(128 + number)
