"""Slow networks on one machine: namespaces joined by a link of a given rate, or delays.

    with link(rate_mbit=1000) as ends:
        ends.run(["python", "script.py"])

runs the script on both ends with torchrun's variables: RANK, WORLD_SIZE, MASTER_ADDR and so on.
"""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.comm import Communicator

ENDS = 2
ADDRESS = "10.77.0.{}"
PORT = 29577
# Bytes that may pass at full speed; the kernel hands over packets of up to 64 KB.
BURST = 128 * 2**10
POLL = 0.05  # seconds


def why_not() -> str | None:
    """Why there can be no link here, and the remedy; None if there can."""
    tools = [tool for tool in ("ip", "tc") if _path(tool) is None]
    if tools:
        return (
            f"A link needs {' and '.join(tools)}: install iproute2, or use --delay, an artificial "
            "delay."
        )
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "Network namespaces need root: run as root, or use --delay, an artificial delay."
    return None


@dataclass(frozen=True)
class Ends:
    """The two ends of a link: namespaces, and the interface in each."""

    namespaces: tuple[str, ...]
    interface: str

    def run(self, command: list[str], timeout: float | None = None) -> None:
        """Run the command on both ends at once.

        Raises RuntimeError as soon as one fails, or after `timeout` seconds; both are ended then.
        """
        # gloo warns that an address of the link has no name: it need not
        environment = os.environ | {
            "WORLD_SIZE": str(ENDS),
            "MASTER_ADDR": ADDRESS.format(1),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": self.interface,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        processes = []
        try:
            for rank, namespace in enumerate(self.namespaces):
                inside = [_path("ip"), "netns", "exec", namespace, *command]
                processes.append(
                    subprocess.Popen(
                        inside, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    )
                )
            _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: list[subprocess.Popen], timeout: float | None) -> None:
    start = time.monotonic()
    while None in (codes := [process.poll() for process in processes]) or any(codes):
        if any(codes):
            raise RuntimeError(
                f"a rank on the link failed, see above; exit codes by rank (None: was still "
                f"running): {codes}"
            )
        if timeout is not None and time.monotonic() - start > timeout:
            raise RuntimeError(f"the ranks on the link had not ended after {timeout} seconds")
        time.sleep(POLL)


@contextmanager
def link(rate_mbit: float) -> Iterator[Ends]:
    """Two namespaces joined by a link that lets `rate_mbit` megabits a second pass each way.

    They are always removed, whatever happens inside. Raises RuntimeError with the remedy if the
    machine does not allow a link.
    """
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    name = f"onebit{os.getpid()}"
    ends = Ends(tuple(f"{name}-{i}" for i in range(1, ENDS + 1)), "veth-onebit")
    with _ended_in_order():
        try:
            _make(ends, rate_mbit)
            yield ends
        finally:
            for namespace in ends.namespaces:  # an interface goes with its namespace
                subprocess.run([_path("ip"), "netns", "del", namespace], capture_output=True)


def _make(ends: Ends, rate_mbit: float) -> None:
    one, two = ends.namespaces
    commands = [f"ip netns add {namespace}" for namespace in ends.namespaces]
    commands.append(
        f"ip link add {ends.interface} netns {one} type veth peer name {ends.interface} netns {two}"
    )
    for i, namespace in enumerate(ends.namespaces, 1):
        commands += [
            f"ip -n {namespace} addr add {ADDRESS.format(i)}/24 dev {ends.interface}",
            f"ip -n {namespace} link set {ends.interface} up",
            f"ip -n {namespace} link set lo up",
            f"tc -n {namespace} qdisc replace dev {ends.interface} root "
            f"tbf rate {rate_mbit}mbit burst {BURST} latency 100ms",
        ]
    for command in commands:
        tool, *arguments = command.split()
        done = subprocess.run([_path(tool), *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"`{command}` failed: {done.stderr.strip()}. A container needs NET_ADMIN and "
                "SYS_ADMIN; or use --delay"
            )


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


def _path(tool: str) -> str | None:
    """Not all users have the system's tools in their path."""
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Delayed(Communicator):
    """Another communicator's collectives, slowed down.

    Each takes at least as long as a link of `rate_mbit` would need for its bytes.
    """

    def __init__(self, inner: Communicator, rate_mbit: float):
        super().__init__(inner.rank, inner.size, inner.device, ordered=True)
        self.inner, self.rate_mbit = inner, rate_mbit

    def duplicate(self) -> "Delayed":
        return Delayed(self.inner.duplicate(), self.rate_mbit)

    def _all_to_all(self, x: Tensor) -> Tensor:
        return self._slowly(self.inner.all_to_all, x, x.nbytes - x[0].nbytes)

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._slowly(self.inner.all_gather, x, (self.size - 1) * x.nbytes)

    def _all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("an ordered mean is made of the other two")

    def _slowly(self, collective, x: Tensor, nbytes: int) -> Tensor:
        due = time.perf_counter() + 8 * nbytes / (1e6 * self.rate_mbit)
        result = collective(x)
        time.sleep(max(due - time.perf_counter(), 0.0))
        return result


class Absent(Communicator):
    """No network: rank 0 of `size` ranks, whose messages all equal its own and take no time.

    It tells what a step costs without its exchange.

    Attributes:
        calls_made: the calls, (name of the collective, shape of its bytes), until it is cleared.
    """

    def __init__(self, size: int):
        super().__init__(rank=0, size=size)
        self.calls_made = []

    def duplicate(self) -> "Absent":
        return Absent(self.size)

    def _all_to_all(self, x: Tensor) -> Tensor:
        self.calls_made.append(("all_to_all", x.shape))
        return x[:1].repeat(self.size, 1)

    def _all_gather(self, x: Tensor) -> Tensor:
        self.calls_made.append(("all_gather", x.shape))
        return x.repeat(self.size, 1)

    def _all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("an ordered mean is made of the other two")


def replay(communicator: Communicator, calls: list[tuple[str, torch.Size]]):
    """A function that makes these collectives, of zeros, one after another."""
    buffers = [
        (getattr(communicator, name), torch.zeros(shape, dtype=torch.uint8))
        for name, shape in calls
    ]

    def exchange():
        for collective, x in buffers:
            collective(x)

    return exchange
