"""Clusters of network namespaces: limited, counted, and gone afterwards, whatever ends them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from onebit.comm import run_threads
from onebit.lab.bench import network
from onebit.lab.bench.network import contenders, sweep
from onebit.lab.bench.network.sweep import Case, Sizes
from onebit.lab.runs.metadata import ROOT

needs_cluster = pytest.mark.usefixtures("cluster_or_skip")
CASE = Case("exchange", "gloo", 2, 1, 100.0)
SIZES = Sizes(2**10, (64, 64, 1, 2, 8), 1)


@pytest.fixture(scope="module")
def cluster_or_skip():
    try:
        with network.link(1000):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))


def namespaces():
    command = [network.tool_path("ip"), "netns", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line}


# every rank sends to the next one, and receives from the one before
AROUND = """
import os, socket, struct, sys, threading, time
rank, size, nbytes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
subnet = os.environ["MASTER_ADDR"].rpartition(".")[0]
server = socket.create_server((f"{subnet}.{rank + 1}", 29000))
def receive():
    left = nbytes
    connection = server.accept()[0]
    begin = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL))[0]
    while left:
        left -= len(connection.recv(min(left, 2**16)))
    open(f"{sys.argv[2]}/{rank}", "w").write(str(time.monotonic() - begin))
thread = threading.Thread(target=receive)
thread.start()
while True:
    try:
        connection = socket.create_connection((f"{subnet}.{(rank + 1) % size + 1}", 29000))
        break
    except OSError:
        time.sleep(0.05)
connection.sendall(struct.pack("d", time.monotonic()) + bytes(nbytes))
thread.join()
"""


@needs_cluster
def test_every_host_of_a_cluster_reaches_the_others_at_no_more_than_its_rate(tmp_path):
    nbytes = 1_000_000
    with network.cluster(hosts=3, rate_mbit=50) as hosts:
        before = hosts.sent()
        hosts.run([sys.executable, "-c", AROUND, str(nbytes), str(tmp_path)], timeout=240)
        sent = network.require_carried(hosts, before, nbytes)
    assert all(nbytes < count < 1.2 * nbytes for count in sent)
    for rank in range(3):
        seconds = float((tmp_path / str(rank)).read_text())
        # since the sender began; the switch has a bucket of its own
        assert seconds >= network.least_seconds(nbytes - network.burst(50), 50)


@needs_cluster
def test_what_the_interfaces_have_not_carried_is_no_result():
    with network.link(100) as hosts:
        with pytest.raises(RuntimeError, match="some went another way"):
            network.require_carried(hosts, hosts.sent(), 1_000_000)


@needs_cluster
def test_open_mpi_runs_a_rank_on_each_host():
    pytest.importorskip("mpi4py")
    script = (
        "import socket\n"
        "from mpi4py import MPI\n"
        "names = MPI.COMM_WORLD.allgather(socket.gethostname())\n"
        "assert len(set(names)) == 2, names\n"
    )
    with network.link(1000) as hosts:
        hosts.run_mpi([sys.executable, "-c", script], timeout=240)


LEFT = """
import sys
from onebit.lab.bench import network
rank = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
with network.cluster(3) as hosts:
    hosts.run([sys.executable, "-c", rank])
"""


@needs_cluster
def test_after_kill_9_the_ranks_end_and_the_next_cluster_removes_what_is_left():
    before = namespaces()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LEFT], cwd=ROOT / "src", stdout=subprocess.PIPE, text=True
    )
    ranks = [int(launcher.stdout.readline()) for _ in range(3)]
    launcher.kill()
    launcher.wait()
    assert len(namespaces() - before) == 4  # three hosts and their switch
    for pid in ranks:
        wait_for_end(pid)
    with network.link(100) as hosts:
        assert namespaces() - before == set(hosts.namespaces)
    assert namespaces() == before


def wait_for_end(pid):
    deadline = time.monotonic() + 90
    while os.path.exists(f"/proc/{pid}") and is_alive(pid):
        assert time.monotonic() < deadline, f"rank {pid} still runs"
        time.sleep(0.05)


def is_alive(pid):
    """A process whose parent has not asked for its end is a zombie, and no longer runs."""
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_cluster
def test_a_cluster_of_a_living_launcher_is_left_alone():
    with network.link(100) as hosts:
        assert network.remove_leftovers() == []
        assert set(hosts.namespaces) <= namespaces()


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_cluster(number):
    before = namespaces()
    script = (
        "import signal, time\nfrom onebit.lab.bench import network\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's `&` ignores it
        "with network.cluster(4):\n    print('up', flush=True)\n    time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT / "src",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.wait(90) != 0
    assert namespaces() == before


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 1), (5, 1), (2, 0)])
def test_an_impossible_cluster_is_refused(hosts, per_host):
    with pytest.raises(ValueError, match="2 to 4 hosts"):
        with network.cluster(hosts, 100, per_host):
            pass


def test_a_time_that_beats_the_wire_is_refused():
    # 1 MB less a burst of 128 KB at 100 Mbit/s
    assert network.least_seconds(1e6, 100) == pytest.approx(8 * (1e6 - 2**17) / 1e8)
    network.require_possible("it", 0.07, 1e6, 100)
    with pytest.raises(RuntimeError, match="did not pass the limited link"):
        network.require_possible("it", 0.069, 1e6, 100)
    network.require_possible("it", 0.0, 1e12, None)


# ---- the sweep


def test_the_bytes_of_the_contenders_are_those_that_no_algorithm_can_avoid():
    case = replace(CASE, hosts=4)
    assert sweep.exchanged("all_reduce", case, 800) == 2 * 3 / 4 * 3200
    # 3 rows of 25 bytes to the others, and 25 averaged bytes
    assert sweep.exchanged("compressed", case, 800) == 100
    two = replace(CASE, per_host=2)
    assert sweep.exchanged("compressed", two, 800) == 2 * 2 * 25 + 2 * 25


def test_every_contender_has_its_bytes_and_its_label():
    names = contenders.exchanges(threads_like_gloo(), 64).keys()
    assert set(names) == {"all_reduce", "all_reduce_fp16", "compressed"}
    for name in names:
        assert sweep.exchanged(name, CASE, 64) > 0


def threads_like_gloo():
    return network.Absent(2)


def test_the_exchange_that_is_timed_is_the_optimizers():
    def counted(communicator):
        contenders.exchanges(communicator, 1000)["compressed"]()
        return communicator.bytes_sent

    # the agreement of 16 bytes, then twice a row of 512 bits and a scale, in words of 16 bytes
    assert run_threads(2, counted)[0] == 16 + 2 * 80


def test_a_case_goes_to_its_ranks_and_back_unchanged():
    assert sweep.from_text(sweep.as_text(CASE, SIZES)) == (CASE, SIZES)


def test_a_case_is_measured_if_it_has_rows_of_all_its_settings():
    rows = json.loads(json.dumps([{**CASE.__dict__, "contender": "compressed"}]))
    assert sweep.is_measured(CASE, rows)
    assert not sweep.is_measured(replace(CASE, rate_mbit=50.0), rows)
    assert not sweep.is_measured(CASE, [])


def test_local_adam_averages_every_period(monkeypatch):
    averaged = []
    monkeypatch.setattr(contenders.dist, "all_reduce", lambda x: averaged.append(x.mul_(3)))
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = contenders.LocalAdam([p], network.Absent(2))
    for step in range(1, 2 * contenders.PERIOD + 1):
        p.grad = torch.zeros(4)
        optimizer.step()
        assert len(averaged) == step // contenders.PERIOD
    assert torch.equal(p.detach(), torch.full((4,), (3 / 2) ** 2))


@needs_cluster
@pytest.mark.timeout(300)
def test_a_sweep_goes_on_where_it_was_stopped(tmp_path):
    def run(*arguments):
        command = [sys.executable, str(ROOT / "experiments/network.py"), "--measure", "--quick"]
        command += ["--results", str(tmp_path), "--parts", "exchange", "--backends", "gloo"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True
        )

    first = run("--rates", "0")
    assert first.returncode == 0, first.stderr
    csv = tmp_path / "speed" / "network.csv"
    rows = csv.read_text()
    again = run("--rates", "0")
    assert "measured" not in again.stdout and csv.read_text() == rows
    assert (tmp_path / "figures" / "network.png").exists()
    other = run("--rates", "0", "--elements", "128")
    assert other.returncode == 1 and "--fresh" in other.stderr
