"""Fixtures of the lab's tests."""

import pytest

from onebit.lab.bench import network


@pytest.fixture(scope="module")
def link_or_skip():
    try:
        with network.link(1000):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def options(cache, tmp_path):
    """Options of a run of 43 steps, 40 of 16 tokens and 3 of 64, warm-ups 6 and 1, into
    tmp_path / name.
    """

    def options(name, *more):
        return [
            "profile=smoke",
            "experiment=table_02",
            "task.text._target_=helpers.lab_text.FewDocuments",
            "task.model.vocab_size=80",
            "task.model.hidden_size=32",
            "task.model.intermediate_size=64",
            "progress=false",
            "checkpoint_every=11",
            f"cache={cache}",
            f"output={tmp_path / name}",
            *more,
        ]

    return options


@pytest.fixture
def own_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
