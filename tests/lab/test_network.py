"""Links of a set rate between processes, and a communicator that is delayed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.launch import BACKENDS

import onebit
from onebit.lab.bench import network
from onebit.lab.runs.metadata import ROOT

needs_link = pytest.mark.usefixtures("link_or_skip")


def test_without_a_network_a_step_is_the_same_but_for_what_others_send():
    p = torch.nn.Parameter(torch.zeros(1000))
    p.grad = torch.linspace(-1, 1, 1000)
    absent = network.Absent(2)
    optimizer = onebit.OneBitAdam([p], warmup=1, variance_floor=1e-3, communicator=absent)
    optimizer.step()
    absent.calls_made.clear()
    optimizer.step()
    assert optimizer.phase == "compressed"
    assert [name for name, _ in absent.calls_made] == [
        "all_gather",
        "all_to_all",
        "all_gather",
    ]  # the agreement, then the exchange
    # to each rank the 512 bits of its chunk and one scale, filled up to a multiple of 16 bytes
    assert absent.calls_made[1][1] == (2, 80)


def delayed(communicator):
    slow, sent = (
        network.Delayed(communicator, rate_mbit=1.0),
        torch.arange(5000, dtype=torch.float32) * (communicator.rank + 1),
    )
    start = time.perf_counter()
    mean = slow.all_reduce(sent)
    seconds = time.perf_counter() - start
    return (
        seconds,
        slow.bytes_sent,
        torch.equal(mean, communicator.all_reduce(sent)),
        slow.duplicate().rate_mbit,
    )


def test_a_delayed_communicator_changes_the_time_only():
    for seconds, sent, equal, rate in BACKENDS["threads"](2, delayed):
        assert equal and rate == 1.0 and sent == 20000
        assert seconds >= 8 * sent / 1e6


def namespaces():
    listed = subprocess.run(
        [network.tool_path("ip"), "netns", "list"], capture_output=True, text=True
    ).stdout
    return {line.split()[0] for line in listed.splitlines() if line}


@needs_link
def test_a_link_is_removed_even_if_its_use_fails():
    before = namespaces()
    with pytest.raises(ValueError, match="inside"):
        with network.link(100) as ends:
            assert set(ends.namespaces) <= namespaces()
            raise ValueError("inside")
    assert namespaces() == before


@needs_link
def test_a_link_is_removed_when_its_process_is_told_to_end():
    before = namespaces()
    script = (
        "import time\nfrom onebit.lab.bench import network\n"
        "with network.link(100):\n    print('up', flush=True)\n    time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT / "src", stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert namespaces() == before


@needs_link
def test_a_rank_that_fails_ends_the_other(capfd):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    with network.link(100) as ends:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"\[None, 3\]"):
            ends.run([sys.executable, "-c", script])
        assert time.monotonic() - start < 30


RECEIVE = """
import os, socket, sys, time
address, left = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 2_000_000
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(address).accept()
    start = time.monotonic()
    while left:
        left -= len(connection.recv(min(left, 2**16)))
    open(sys.argv[1], "w").write(str(time.monotonic() - start))
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(bytes(left))
"""


@needs_link
def test_a_link_lets_no_more_pass_than_its_rate(tmp_path):
    with network.link(100) as ends:
        ends.run([sys.executable, "-c", RECEIVE, str(tmp_path / "seconds")], timeout=240)
    wire = 8 * (2_000_000 - network.burst(100)) / 100e6
    assert float((tmp_path / "seconds").read_text()) >= wire


@pytest.mark.parametrize(("broken", "named"), [("geteuid", "root"), ("which", "iproute2")])
def test_where_there_can_be_no_link_the_remedy_is_named(monkeypatch, broken, named):
    monkeypatch.setattr("shutil.which", lambda tool, path: None if broken == "which" else tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match=f"{named}.*--delay"):
        with network.link(100):
            pass
