"""Speed experiments: contenders really alternate, what was disturbed is dropped and counted, each runs from measuring to figure.

No test here is about how fast anything is.
"""

import os
import signal
import subprocess
import sys
import time
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.launch import BACKENDS

import onebit
from onebit.kernels.torch_ops import pack_signs
from onebit.lab.bench import bars as speed_results
from onebit.lab.bench import network
from onebit.lab.bench.bars import Bar
from onebit.lab.bench.timing import (
    DROPS_PER_ROUND,
    FOREIGN_LIMIT,
    Guard,
    InStep,
    Timings,
    alternate,
)
from onebit.lab.report.figure import load_figure
from onebit.lab.runs.load import RESULTS
from onebit.lab.runs.metadata import ROOT, machine

EXPERIMENTS = ("kernel_speed", "step_cost", "overlap")
needs_link = pytest.mark.usefixtures("link_or_skip")


@pytest.fixture(scope="module")
def link_or_skip():
    try:
        with network.link(1000):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))


class FakeGuard:
    """Says of each stretch what it is told to; the last word again and again."""

    def __init__(self, *shares):
        self.shares = list(shares)

    def start(self):
        pass

    def share(self):
        return self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]


@pytest.fixture
def stretches_of_one_round(monkeypatch):
    monkeypatch.setattr("onebit.lab.bench.timing.STRETCH", 0.0)


# ---- timing


def test_contenders_run_in_turn_and_each_round_begins_with_another(stretches_of_one_round):
    calls = []
    alternate(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        4,
        warmup=2,
        guard=FakeGuard(0.0),
    )
    assert "".join(calls) == "abcbca" + "cababcbcacab"


def test_a_time_goes_to_the_contender_that_took_it():
    timings = alternate(
        {"slow": lambda: time.sleep(0.02), "quick": lambda: None}, 2, guard=FakeGuard(0.0)
    )
    assert timings.seconds["slow"].min() >= 0.02 > timings.seconds["quick"].max()
    assert len(timings.seconds["slow"]) == len(timings.seconds["quick"])


def test_ratios_are_those_of_the_rounds_and_the_bar_is_about_the_medians():
    seconds = {"a": np.array([1.0, 2.0, 30.0]), "b": np.array([1.0, 4.0, 5.0])}
    row = Timings(seconds, dropped=7, disturbed=0).summary("a", "b")
    assert row["ratio"] == 2 / 4 and row["round_ratio"] == 1.0
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx(
        tuple(np.percentile([1.0, 0.5, 6.0], (10, 90)))
    )
    assert (row["rounds"], row["dropped"], row["median_ms"], row["ratio_to"]) == (3, 7, 2000.0, "b")


def test_a_disturbed_round_is_dropped_repeated_and_counted(stretches_of_one_round):
    timings = alternate({"a": lambda: None}, 3, guard=FakeGuard(0.0, 1.0, 1.0, FOREIGN_LIMIT))
    assert (len(timings.seconds["a"]), timings.dropped, timings.disturbed) == (3, 2, 0)


def test_a_machine_that_is_never_quiet_is_said_to_be_so(stretches_of_one_round):
    timings = alternate({"a": lambda: None}, 2, guard=FakeGuard(1.0))
    assert (len(timings.seconds["a"]), timings.dropped, timings.disturbed) == (
        2,
        2 * DROPS_PER_ROUND,
        2,
    )


def test_the_guards_share_is_that_of_other_processes(monkeypatch):
    guard = Guard(pace=type("", (), {"max": staticmethod(list), "sum": staticmethod(list)}))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Guard, "_now", staticmethod(lambda: (10.0, 1.0, 100.0)))
    guard.start()
    monkeypatch.setattr(Guard, "_now", staticmethod(lambda: (13.0, 2.0, 102.0)))
    assert guard.share() == (3 - 1) / (2 * 4)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="no /proc/stat")
def test_own_work_counts_as_ours_and_as_the_machines():
    before = Guard._now()
    while time.process_time() < before[1] + 0.3:
        pass
    busy, own, wall = (now - then for now, then in zip(Guard._now(), before))
    assert own >= 0.3 and wall >= 0.3 and busy >= 0.25  # the kernel counts in 10 ms


def together(communicator):
    contenders = {"a": lambda: time.sleep(0.02 * communicator.rank), "b": lambda: None}
    return alternate(contenders, 2, pace=InStep()).seconds


def test_ranks_in_step_all_have_the_slowest_ones_time():
    one, two = BACKENDS["gloo"](2, together)
    for name in "ab":
        assert np.array_equal(one[name], two[name])
    assert one["a"].min() >= 0.02


# ---- files and bars


def test_rows_and_facts_are_read_as_they_were_written(tmp_path):
    rows = [
        {"contender": "a", "n": 64, "ratio": 0.25, "hidden": None},
        {"contender": "b", "n": 64, "ratio": 1.0, "hidden": 0.5},
    ]
    speed_results.write(tmp_path, "made_up", rows, {"seed": 3})
    read, facts = speed_results.read(tmp_path, "made_up")
    pd.testing.assert_frame_equal(read, pd.DataFrame(rows).astype({"hidden": float}))
    assert (
        facts["config"] == {"seed": 3}
        and facts["machine"] == machine()
        and facts["commit"]
        and facts["date"]
    )
    with pytest.raises(FileNotFoundError, match="python experiments/other.py --measure"):
        speed_results.read(tmp_path, "other")


def test_a_bar_that_is_missed_or_not_measured_is_said_so():
    found = {"contender": "a", "ratio_low": 0.1, "ratio_high": 0.9, "ratio_to": "b"}
    rows = pd.DataFrame([{**found, "n": n, "ratio": ratio} for n, ratio in ((1, 0.5), (2, 0.51))])
    bars = tuple(Bar("a", "ratio", 0.5, {"n": n}) for n in (1, 2, 3))
    assert list(speed_results.judge(bars, rows).holds) == ["yes", "NO", "not measured"]


@pytest.mark.parametrize("name", ["kernel_speed", "step_cost"])
def test_every_bar_is_about_something_that_is_measured(name):
    module = load_figure(name)
    measured = {"n": speed_results.SIZES, "threads": (1, 2), "workers": (2, 4), "tensors": (1,)}
    for bar in module.BARS:
        assert bar.contender in module.LABELS
        assert all(value in measured[column] for column, value in bar.where.items())


def test_sizes_are_written_short():
    assert [speed_results.size_text(n) for n in (*speed_results.SIZES, 205000)] == [
        "64K",
        "256K",
        "1M",
        "4M",
        "16M",
        "64M",
        "200.2K",
    ]


# ---- what is timed is the real thing


def test_the_kernels_that_are_timed_do_the_same_work():
    made = load_figure("kernel_speed").contenders(2**12, seed=1)
    for _ in range(3):
        made["compress"]()
        made["torch_ops"]()
    assert torch.equal(made["compress"].compensated, made["torch_ops"].compensated)
    tidy = made["torch_tidy"]
    assert torch.equal(tidy(), pack_signs(tidy.m)) and not torch.equal(
        tidy(), pack_signs(tidy.m)
    )  # the second time with an error
    assert torch.equal(load_figure("kernel_speed").TorchTidy(tidy.m)(), pack_signs(tidy.m))


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
    assert absent.calls_made[1][1] == (
        2,
        512 // 8 + 4,
    )  # to each rank the bits of its chunk and one scale


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


# ---- the link


def namespaces():
    listed = subprocess.run(
        [network._path("ip"), "netns", "list"], capture_output=True, text=True
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
    script = "import time\nfrom onebit.lab import network\nwith network.link(100):\n    print('up', flush=True)\n    time.sleep(60)"
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
        ends.run([sys.executable, "-c", RECEIVE, str(tmp_path / "seconds")], timeout=60)
    wire = 8 * (2_000_000 - network.BURST) / 100e6
    assert float((tmp_path / "seconds").read_text()) >= wire


@pytest.mark.parametrize(("broken", "named"), [("geteuid", "root"), ("which", "iproute2")])
def test_where_there_can_be_no_link_the_remedy_is_named(monkeypatch, broken, named):
    monkeypatch.setattr("shutil.which", lambda tool, path: None if broken == "which" else tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match=f"{named}.*--delay"):
        with network.link(100):
            pass


# ---- from measuring to the figure


QUICK = {"kernel_speed": (2**16,), "step_cost": (2**12,)}


def run(name, root, *arguments):
    command = [
        sys.executable,
        str(ROOT / "experiments" / f"{name}.py"),
        "--results",
        str(root),
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


def settings(name, rows, quick):
    """What there must be a row for: {(contender, setting)}."""
    module = load_figure(name)
    if name == "kernel_speed":
        sizes = QUICK[name] if quick else speed_results.SIZES
        return {
            (contender, n, threads)
            for contender in module.BYTES
            for n in sizes
            for threads in module.THREADS
        }, ["n", "threads"]
    if name == "step_cost":
        sizes = QUICK[name] if quick else speed_results.SIZES
        tensors = [(n, 1) for n in sizes] + [(rows.n[rows.tensors > 1].iloc[0], rows.tensors.max())]
        return {
            (contender, n, count, W)
            for contender in module.LABELS
            for n, count in tensors
            for W in module.RANKS
        }, ["n", "tensors", "workers"]
    rates = (1000.0,) if quick else (1000.0, 200.0)
    left_out = {module.RIVAL} if set(rows["mode"]) == {"delay"} else set()
    return set(product(module.LABELS.keys() - left_out, module.COMPUTED, rates)), [
        "computed",
        "rate_mbit",
    ]


def check(name, root, quick):
    rows, facts = speed_results.read(root, name)
    wanted, columns = settings(name, rows, quick)
    found = list(rows[["contender", *columns]].itertuples(index=False, name=None))
    assert len(found) == len(set(found)) and set(found) == wanted
    assert (rows[["median_ms", "ratio", "ratio_low", "ratio_high"]] > 0).all(axis=None)
    assert (rows.rounds >= facts["config"]["rounds"]).all()
    assert {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "numba"} <= facts[
        "machine"
    ].keys() and "seed" in facts["config"]
    return rows


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("kernel_speed", []), ("step_cost", []), ("overlap", []), ("overlap", ["--delay"])],
)
def test_an_experiment_runs_from_measuring_to_its_figure(
    name, arguments, tmp_path, monkeypatch, request
):
    if name == "overlap" and not arguments:
        request.getfixturevalue("link_or_skip")
    done = run(name, tmp_path, "--measure", "--quick", *arguments)
    assert done.returncode == 0, done.stderr
    rows = check(name, tmp_path, quick=True)
    if name == "kernel_speed":
        assert "yes" in done.stdout or "NO" in done.stdout  # the bar at 64K
    if name == "overlap":
        assert (
            set(rows["mode"]) == {"delay" if arguments else "namespaces"}
            and rows.hidden.notna().sum() == 2
        )
    figure = tmp_path / "figures" / f"{name}.png"
    before = figure.read_bytes(), figure.with_suffix(".pdf").read_bytes()
    monkeypatch.setattr(sys, "argv", [name, "--results", str(tmp_path)])
    load_figure(name).main()
    assert (figure.read_bytes(), figure.with_suffix(".pdf").read_bytes()) == before


def test_without_measurements_a_figure_says_how_to_make_them(tmp_path):
    done = run("kernel_speed", tmp_path)
    assert done.returncode == 1 and "--measure" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_measurements_are_complete(name):
    if not (RESULTS / "speed" / f"{name}.csv").exists():
        pytest.skip(
            f"results/speed/{name}.csv is not there: python experiments/{name}.py --measure makes it"
        )
    rows = check(name, RESULTS, quick=False)
    assert (speed_results.judge(getattr(load_figure(name), "BARS", ()), rows).holds == "yes").all()
    assert (RESULTS / "figures" / f"{name}.png").exists()
