"""`python -m onebit.plan`: answers that can be checked by hand, errors that name the remedy."""

import subprocess
import sys
from argparse import ArgumentTypeError
from math import inf

import pytest
from helpers.cases import holds_for_each

from onebit.plan import Question, answers, pays_below, units
from onebit.plan.__main__ import main
from onebit.plan.answer import PAYS, RIVAL, speedup
from onebit.time_model import Cluster, Link

BASIC = "--parameters 340e6 --gpus 64 --gpus-per-node 8 --bandwidth 10Gbit --compute 0.2".split()


def question(bandwidth=10e9, **changes):
    cluster = Cluster(8, 8, Link(200e9), Link(bandwidth))
    return Question(340_000_000, cluster, 0.2, **changes)


@pytest.mark.parametrize(
    ("text", "value"),
    [("10Gbit", 1e10), ("100 Mbit/s", 1e8), ("1.25GB/s", 1e10), ("64kbps", 64e3), ("1e9bit", 1e9)],
)
def test_bandwidths_are_read_as_they_are_written(text, value):
    assert units.bits_per_second(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("0.2", 0.2), ("200ms", 0.2), ("50us", 50e-6)])
def test_times_are_read_as_they_are_written(text, value):
    assert units.seconds(text) == pytest.approx(value)


@holds_for_each(
    [
        (units.bits_per_second, "10"),
        (units.bits_per_second, "0Gbit"),
        (units.bits_per_second, "1.2.3Gbit"),
        (units.seconds, "-1"),
        (units.count, "1.5"),
        (units.count, "many"),
        (units.share, "1.2"),
        (units.share, "%"),
    ]
)
def test_other_quantities_are_refused(kind, text):
    with pytest.raises(ArgumentTypeError):
        kind(text)


def test_a_dense_step_takes_what_the_ring_takes():
    # 2 * 63 / 64 * 680 MB over 10 Gbit/s = 1.071 s, of which backward hides 0.133 s
    rival = answers(question())[0]
    assert rival.optimizer == RIVAL and rival.speedup == 1
    assert rival.seconds == pytest.approx(0.2 + 1.071 - 0.1333, rel=1e-3)


def test_what_is_saved_follows_from_the_step():
    rival, onebit_adam, *_ = answers(question())
    assert onebit_adam.hours_saved == pytest.approx(24 * (1 - onebit_adam.seconds / rival.seconds))
    steps = 24 * 3600 / rival.seconds
    saved = (rival.nbytes - onebit_adam.nbytes) * 64 * steps
    assert onebit_adam.bytes_saved == pytest.approx(saved)


def test_the_limit_is_where_the_gain_passes_what_pays():
    limit = pays_below(question(), "OneBitAdam")
    assert speedup(question(limit * 0.99), "OneBitAdam") > PAYS
    assert speedup(question(limit * 1.01), "OneBitAdam") < PAYS


def test_what_pays_at_every_bandwidth_or_at_none_is_said_so():
    assert pays_below(question(warmup=1.0), "OneBitAdam") == 0.0
    slow_inside = Cluster(8, 8, Link(1e9), Link(1e9))
    assert pays_below(Question(340_000_000, slow_inside, 0.2), "ZeroOneAdam") == inf


def test_a_slow_link_pays_and_a_fast_one_does_not(capsys):
    main(BASIC)
    said = capsys.readouterr().out
    assert "It pays: with ZeroOneAdam" in said and "pays up to" in said
    main([*BASIC, "--bandwidth", "800Gbit"])
    assert "It does not pay" in capsys.readouterr().out


def test_only_the_optimizer_that_was_asked_for_is_shown(capsys):
    main([*BASIC, "--optimizer", "OneBitAdam"])
    said = capsys.readouterr().out
    assert "OneBitAdam" in said and "ZeroOneAdam" not in said and RIVAL in said


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (["--gpus", "63"], "ask for a multiple of 8"),
        (["--gpus", "1", "--gpus-per-node", "1"], "--gpus 2 or more"),
        (["--measure"], "torchrun --nproc-per-node 2"),
    ],
)
def test_an_impossible_question_is_answered_by_the_remedy(change, remedy, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match=remedy):
        main([*BASIC, *change])


@pytest.mark.parametrize(
    ("left_out", "remedy"),
    [("--gpus", "--gpus 64"), ("--bandwidth", "--bandwidth 10Gbit"), ("--compute", "--compute")],
)
def test_what_is_missing_is_asked_for(left_out, remedy):
    i = BASIC.index(left_out)
    with pytest.raises(SystemExit, match=remedy):
        main(BASIC[:i] + BASIC[i + 2 :])


def test_without_matplotlib_only_the_picture_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(BASIC)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        main([*BASIC, "--plot", str(tmp_path / "plan.png")])


def test_the_picture_is_drawn(tmp_path):
    main([*BASIC, "--plot", str(tmp_path / "plan.png")])
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_the_command_needs_torch_and_numpy_only():
    script = (
        "import sys\n"
        "from onebit.plan.__main__ import main\n"
        f"main({BASIC!r})\n"
        "bad = {'matplotlib', 'pandas', 'scipy', 'hydra', 'numba', 'mpi4py'} & sys.modules.keys()\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_measured_links_answer_for_what_is_not_given(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "onebit.plan", "--measure", "--parameters", "1e6", "--compute", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "Measured on 2 processes" in done.stdout and "AdamW" in done.stdout
    assert done.stdout.count("optimizer  ") == 1  # one table, not one for each process
