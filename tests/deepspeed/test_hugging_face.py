"""Hugging Face's Accelerate and Trainer make DeepSpeed's real engine, over gloo."""

import pytest
import runs
from engines import assert_same

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")


def test_an_engine_of_accelerate_trains_as_one_of_deepspeed(engines):
    expected = engines(2, runs.trained, "OneBitAdam", "fp32", 7)
    for (ours, _, _), theirs in zip(expected, engines(2, runs.accelerated, 7)):
        assert theirs["phase"] == "compressed"
        assert_same(ours, theirs)


def test_an_accelerator_without_deepspeed_is_refused(engines):
    for kind, text in engines(2, runs.plain_accelerator):
        assert kind == "ValueError" and "does not use DeepSpeed" in text


def test_the_trainer_compresses_and_its_resumed_run_is_the_same(engines, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    for whole, resumed in engines(2, runs.with_trainer, str(tmp_path)):
        assert whole["phase"] == "compressed" and whole["steps"] == 24
        assert_same(whole, resumed)
