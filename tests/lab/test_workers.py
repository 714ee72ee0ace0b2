"""Workers end together: killed, failed, held by another run, or started by a launcher."""

import signal
import subprocess
import time
from importlib.util import find_spec

import pytest
from helpers.lab_runs import environment, record, train_command, train_in_threads
from hydra.errors import InstantiationException

from onebit.lab.config import composed
from onebit.lab.training.run import run_from
from onebit.lab.training.workers import hold


def test_a_killed_run_leaves_no_process_and_a_checkpoint(options, tmp_path):
    """kill -9 of the parent: its workers end by themselves."""
    command = train_command(options("killed", "comm=gloo", "workers=2", "scale.steps_divisor=400"))
    process = subprocess.Popen(
        command, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    latest = tmp_path / "killed/checkpoints/latest"
    deadline = time.monotonic() + 240
    while not latest.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while processes_of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of_session(process.pid) == []
    assert latest.exists()
    assert record(tmp_path / "killed")["status"] == "running"


def processes_of_session(session):
    listed = subprocess.run(
        ["ps", "-eo", "sess=,stat=,pid="], capture_output=True, text=True, check=True
    ).stdout
    fields = [line.split() for line in listed.splitlines()]
    return [pid for sess, stat, pid in fields if sess == str(session) and not stat.startswith("Z")]


def test_a_folder_belongs_to_one_run_at_a_time(options, tmp_path):
    with hold(tmp_path / "run"), pytest.raises(RuntimeError, match="another run"):
        hold(tmp_path / "run")
    with hold(tmp_path / "run"):
        pass


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize("comm", ["threads", "gloo"])
def test_workers_are_not_started_once_more_under_a_launcher(options, monkeypatch, variable, comm):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(InstantiationException, match="launcher has started 2 processes"):
        run_from(composed(options("run", f"comm={comm}")))


def test_a_failing_worker_ends_all_with_its_traceback(options):
    broken = "task._target_=helpers.lab_broken.BrokenOnRank1"
    with pytest.raises(KeyError, match="broken data"):
        train_in_threads(options("threads", "workers=2", broken))
    command = train_command(options("gloo", "comm=gloo", "workers=2", broken))
    process = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 1
    assert "worker 1 failed" in process.stderr
    assert "KeyError: 'broken data'" in process.stderr


def test_mpi_without_mpirun_gives_the_launch_line(options):
    if not find_spec("mpi4py"):
        pytest.skip("no mpi4py")
    process = subprocess.run(
        train_command(options("run", "comm=mpi", "workers=3")),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 1
    assert "mpirun -n 3 python -m onebit.lab.train" in process.stderr
