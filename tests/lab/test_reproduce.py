"""`make reproduce`: what is there is kept, what is missing is trained, what fails does not stop the
rest.
"""

import sys

import pytest
from helpers import synthetic

from onebit.lab import reproduce
from onebit.lab.report.artifact import Figure
from onebit.lab.runs import planned
from onebit.lab.runs.load import SEEDS, TUNING_SEED, run_folder

FIGURE_04 = ["adam", "onebit_adam", "onebit_adam_32bit", "naive_onebit_adam"]


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Results in a folder of their own, and training that writes a made-up run.

    Returns the runs that were trained.
    """
    trained = []

    def train(experiment, optimizer, profile, seed, workers, folder):
        trained.append((optimizer, seed))
        if optimizer in lab_fails:
            return 1
        synthetic.write(
            folder.parents[4], optimizer, seed, 4.0 * (1 + (optimizer == "naive_onebit_adam"))
        )
        return 0

    lab_fails = set()
    train.fails = lab_fails
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    monkeypatch.setattr(reproduce, "LIVE", tmp_path / "live")
    monkeypatch.setattr(reproduce, "train", train)
    monkeypatch.setattr(reproduce, "commit", lambda: "0123456")
    monkeypatch.setattr(
        planned, "data_to_come", lambda config: {"corpus_sha256": "a"}
    )  # reading it takes seconds
    train.draw = Figure.save
    monkeypatch.setattr(Figure, "save", lambda figure, *_: figure.name)  # drawing takes seconds
    train.trained, train.root = trained, tmp_path
    return train


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["reproduce", *arguments])
    reproduce.main()


def test_only_what_is_missing_is_trained_then_the_figure_is_drawn(lab, monkeypatch, capsys):
    monkeypatch.setattr(Figure, "save", lab.draw)
    synthetic.write_all(lab.root, seeds=(1, 2))
    run(monkeypatch, "figure_04", "--seeds", "1", "2", "3")
    assert lab.trained == [(optimizer, 3) for optimizer in FIGURE_04]
    assert (lab.root / "figures" / "figure_04.png").exists()
    assert "C3" in capsys.readouterr().out


def test_missing_data_stop_all_before_training_with_the_command_that_fetches_them(lab, monkeypatch):
    def missing(config):
        raise RuntimeError("fetch it with this command")

    monkeypatch.setattr(planned, "data_to_come", missing)
    synthetic.write_all(lab.root, seeds=(1,))
    with pytest.raises(SystemExit, match="error: fetch it with this command\nNothing was trained"):
        run(monkeypatch, "figure_04", "--seeds", "2")
    assert lab.trained == []


def test_figures_that_read_the_same_runs_train_them_once(lab, monkeypatch):
    run(monkeypatch, "figure_01", "figure_02", "figure_04", "--seeds", "1")
    assert sorted(lab.trained) == sorted((optimizer, 1) for optimizer in FIGURE_04)


def test_a_run_that_was_interrupted_is_gone_on_with(lab, monkeypatch):
    synthetic.write_all(lab.root, seeds=(1,))
    folder = run_folder(lab.root, "figure_04", "laptop", "onebit_adam", 1)
    (folder / "run.json").write_text(
        (folder / "run.json").read_text().replace("finished", "running")
    )
    monkeypatch.setattr(synthetic, "write", lambda *_: None)
    run(monkeypatch, "figure_04", "--seeds", "1")
    assert lab.trained == [("onebit_adam", 1)]
    assert folder.exists()


def test_a_run_that_fails_does_not_stop_the_others_and_is_named_at_the_end(lab, monkeypatch):
    lab.fails.add("onebit_adam")
    with pytest.raises(SystemExit, match="Failed, see above: onebit_adam, seed 1 of figure_04"):
        run(monkeypatch, "figure_04", "--seeds", "1")
    assert [optimizer for optimizer, _ in lab.trained] == FIGURE_04
    lab.fails.clear()
    run(monkeypatch, "figure_04", "--seeds", "1")
    assert lab.trained[4:] == [("onebit_adam", 1)]


def test_a_live_seed_is_none_of_the_committed_ones_and_is_judged(lab, monkeypatch, capsys):
    monkeypatch.setattr(Figure, "save", lab.draw)
    synthetic.write_all(lab.root)
    before = sorted(lab.root.joinpath("runs").rglob("*"))
    run(monkeypatch, "figure_04", "--live")
    assert lab.trained == [(optimizer, 4) for optimizer in FIGURE_04]
    assert sorted(lab.root.joinpath("runs").rglob("*")) == before
    assert (lab.root / "live" / "figures" / "figure_04.png").exists()
    out = capsys.readouterr().out
    assert "consistent" in out and "Took 0 min" in out


def test_a_live_run_of_another_commit_is_trained_anew(lab, monkeypatch):
    run(monkeypatch, "figure_01", "--live")
    run(monkeypatch, "figure_01", "--live")
    assert len(lab.trained) == 2
    monkeypatch.setattr(reproduce, "commit", lambda: "89abcde")
    run(monkeypatch, "figure_01", "--live")
    assert len(lab.trained) == 4


def test_fresh_trains_the_asked_seeds_anew_and_no_others(lab, monkeypatch):
    synthetic.write_all(lab.root, seeds=(1, 2))
    run(monkeypatch, "figure_01", "--seeds", "2", "--fresh")
    assert lab.trained == [("adam", 2), ("naive_onebit_adam", 2)]


def test_the_papers_profile_is_sent_to_a_cluster(lab, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "figure_04", "--profile", "paper")
    assert "make plan-figure-4 PROFILE=paper" in capsys.readouterr().err
    assert lab.trained == []


def test_without_seeds_those_of_the_results_are_trained(lab, monkeypatch):
    run(monkeypatch, "figure_01")
    assert sorted({seed for _, seed in lab.trained}) == list(SEEDS)
    assert TUNING_SEED not in SEEDS


def test_a_negative_seed_is_refused(lab, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "figure_01", "--seeds", "-1")
    assert "seeds are whole numbers above 0, not -1" in capsys.readouterr().err
    assert lab.trained == []


def test_the_tuning_seed_is_refused(lab, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "figure_01", "--seeds", "0", "1")
    assert "not among the results" in capsys.readouterr().err
    assert lab.trained == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": synthetic.config("adam") | {"lr": 1.0}}, "lr"),
        ({"workers": 2}, "workers"),
        ({"corpus_sha256": "b"}, "corpus_sha256"),
    ],
    ids=["option", "workers", "text"],
)
def test_a_run_that_was_trained_in_another_way_stops_all_before_training(
    lab, monkeypatch, changes, named
):
    synthetic.write(lab.root, "adam", 1, 4.0, changes=changes)
    with pytest.raises(SystemExit, match=rf"differ in {named}.*seed-1.*FRESH=1"):
        run(monkeypatch, "figure_01", "--seeds", "1", "2")
    assert lab.trained == []
    run(monkeypatch, "figure_01", "--seeds", "1", "2", "--fresh")
    assert len(lab.trained) == 4


def test_a_live_run_with_uncommitted_changes_is_never_kept(lab, monkeypatch):
    monkeypatch.setattr(reproduce, "commit", lambda: "0123456+dirty")
    run(monkeypatch, "figure_01", "--live")
    run(monkeypatch, "figure_01", "--live")
    assert len(lab.trained) == 4


def test_an_unknown_figure_is_one_line_that_names_those_that_exist(lab, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "figure_7")
    error = capsys.readouterr().err
    assert "figure_04" in error and error.count("\n") == 1


def test_an_interruption_is_one_line(lab, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "train", interrupted)
    with pytest.raises(SystemExit, match="^\nInterrupted. The same command continues from here.$"):
        run(monkeypatch, "figure_01", "--live")
