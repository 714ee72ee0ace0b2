"""onebit's optimizers in DeepSpeed's real engine, over gloo."""

import csv
import itertools
import os
import re

import pytest
import runs
import torch
from engines import assert_same
from helpers.cases import more, more_of

KINDS = tuple(runs.KINDS)
ALWAYS = [("OneBitAdam", "fp32"), ("ZeroOneAdam", "fp16"), ("OneBitLamb", "bf16")]


@pytest.mark.parametrize("kind", ["OneBitAdam", *more("ZeroOneAdam", "OneBitLamb")])
def test_the_engine_trains_as_a_plain_loop_does(engines, kind):
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    in_engine = engines(2, runs.trained, kind, "fp32", 7, config)
    plain = engines(2, runs.trained_plainly, kind, 7, 2)
    clipped = engines(2, runs.trained_with_norm, kind, 7, 2, 0.3)
    for (state, _, sent), (params, _), (with_norm, plainly_sent) in zip(in_engine, plain, clipped):
        assert all(torch.equal(a, b) for a, b in zip(state["model"], with_norm))
        assert not all(torch.equal(a, b) for a, b in zip(state["model"], params))
        assert sent == plainly_sent


@pytest.mark.parametrize(
    ("kind", "dtype"),
    ALWAYS + more_of(*sorted(set(itertools.product(KINDS, runs.DTYPES)) - set(ALWAYS))),
)
def test_a_resumed_run_equals_the_uninterrupted_one_on_every_rank(engines, kind, dtype, tmp_path):
    """Saved in the compressed phase; 0/1 Adam between two syncs, where each rank has a model."""
    whole = engines(2, runs.trained, kind, dtype, 9)
    resumed = engines(2, runs.interrupted, kind, dtype, 6, 3, str(tmp_path))
    for (state, losses, _), (again, later, path) in zip(whole, resumed):
        assert path is not None and losses[6:] == later
        assert_same(state, again)
    assert losses[-1] < losses[0] and whole[0][0]["phase"] == "compressed"


def test_replicas_are_equal_and_a_compressed_step_sends_little(engines):
    (first, losses, sent), (second, _, _) = engines(2, runs.trained, "OneBitAdam", "fp32", 7)
    assert_same_parameters(first, second)
    assert losses[-1] < losses[0] and sent == 112


def assert_same_parameters(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first["model"], second["model"]))


@pytest.mark.parametrize("way", ["boundary", "no_sync"])
def test_the_engine_averages_nothing(engines, way):
    """Neither at the end of an accumulation, nor after no_sync, nor when it is asked to."""
    first, second = engines(2, runs.gradients_after, "OneBitAdam", way)
    assert not any(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_forgotten_attach_is_an_error_at_the_second_step(engines, is_plain):
    for first, second in engines(2, runs.forgotten, is_plain):
        assert first is None
        assert second[0] == "RuntimeError" and "attach(engine) was forgotten" in second[1]


def test_half_precision_of_a_plain_optimizer_names_what_prepares_it(engines):
    for found in engines(2, runs.unprepared):
        for kind, text in found:
            assert kind == "RuntimeError" and "onebit.deepspeed.prepare(" in text


def test_what_cannot_work_is_refused_with_what_to_do(engines):
    expected = {
        "ZeRO 1": ("ValueError", "ZeRO stage 1.*Set the stage to 0"),
        "ZeRO 2": ("ValueError", "ZeRO stage 2.*Set the stage to 0"),
        "torch": ("TypeError", "SGD.*from_config"),
        "group": ("ValueError", "TorchDistributed"),
        "overlap": ("ValueError", "overlap=False"),
        "lacking": ("ValueError", "does not have 2.weight"),
        "clipping": ("ValueError", "keep one"),
        "experts": ("ValueError", "MoE.*DeepSpeed's own Adam"),
        "model": ("TypeError", "takes the engine"),
    }
    for found in engines(2, runs.refusals):
        assert found.keys() == expected.keys()
        for name, (kind, text) in expected.items():
            assert found[name][0] == kind, name
            assert re.search(text, found[name][1]), found[name][1]


@pytest.mark.parametrize("kind", ["OneBitAdam", *more("ZeroOneAdam")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(engines, kind, tmp_path):
    for seen, end, resumed in engines(2, runs.overflowing, kind, str(tmp_path)):
        skipped, scales, steps, rates = zip(*seen)
        assert [step for step, skip in enumerate(skipped) if skip] == [2, 5]
        halvings = [2.0**16, 2.0**15, 2.0**14]
        assert list(scales) == [halvings[0]] * 2 + [halvings[1]] * 3 + [halvings[2]] * 3
        assert list(steps) == [1, 2, 2, 3, 4, 4, 5, 6]
        assert rates[2] == rates[1] and rates[5] == rates[4]  # the schedule waits
        assert_same(end, resumed)


@pytest.mark.parametrize("dtype", ["fp32", *more("fp16")])
def test_a_checkpoint_is_taken_into_another_mask(engines, dtype, tmp_path):
    for (ten, three, none), has_mask in engines(2, runs.another_mask, dtype, str(tmp_path)):
        assert ten[:10].all() and not ten[10:].any()
        assert three[:3].all() and not three[3:].any()
        assert none[:10].all() and not any(has_mask)


def test_a_checkpoint_is_taken_into_an_earlier_phase(engines, tmp_path):
    """The phase follows the new setting, and momentum takes over what the errors held."""
    engines(2, runs.saved, "OneBitAdam", 6, str(tmp_path))
    for error, state, losses in engines(2, runs.loaded_into_warmup, str(tmp_path)):
        assert error is None and state["phase"] == "warmup" and losses[-1] < losses[0]


def test_another_number_of_ranks_is_an_error_on_all_unless_the_errors_are_shared(engines, tmp_path):
    apart, shared = str(tmp_path / "apart"), str(tmp_path / "shared")
    engines(2, runs.saved, "OneBitAdam", 6, apart)
    for error, _, _ in engines(3, runs.loaded, "OneBitAdam", apart):
        assert "another number of ranks" in error and "synchronize()" in error
    saved = engines(2, runs.saved, "OneBitAdam", 6, shared, True)
    assert [name for name in os.listdir(f"{shared}/global_step6") if "onebit" in name] == []
    for error, state, losses in engines(3, runs.loaded, "OneBitAdam", shared, 2):
        assert error is None and len(losses) == 2
        for i in range(4):
            name = f"{i} worker_error"
            assert torch.equal(state["state"][name], saved[0]["state"][name])


def test_a_lost_file_of_a_rank_is_an_error_on_all(engines, tmp_path):
    engines(2, runs.saved, "OneBitAdam", 6, str(tmp_path))
    (tmp_path / "global_step6" / "onebit_mp_rank_00_dp_rank_01_of_02.pt").unlink()
    for error, _, _ in engines(2, runs.loaded, "OneBitAdam", str(tmp_path)):
        assert "dp_rank_01" in error and "the file is lost" in error


def test_the_monitor_has_the_traffic(engines, tmp_path):
    last, _ = engines(2, runs.monitored, str(tmp_path))
    rows = {}
    for name in ("bytes_sent", "compression_ratio", "compressed"):
        (path,) = tmp_path.rglob(f"*onebit_{name}.csv")
        rows[name] = [float(row[1]) for row in list(csv.reader(path.open()))[1:]]
    assert rows["bytes_sent"][-1] == last.bytes_sent < rows["bytes_sent"][0]
    assert rows["compressed"] == [0, 0, 0, 1, 1, 1]
    assert rows["compression_ratio"][-1] == pytest.approx(last.compression_ratio)


@pytest.mark.parametrize("stages", [2, *more(1)])
def test_a_pipeline_exchanges_among_the_replicas_of_each_stage(engines, stages, tmp_path):
    """2 stages of 2 replicas, 1 stage of 4: replicas stay equal; a resumed run is the same."""
    whole = engines(4, runs.pipeline, stages, str(tmp_path))
    resumed = engines(4, runs.pipeline, stages, str(tmp_path), True)
    for stage in range(stages):
        replicas = [params for s, params, _, _ in whole + resumed if s == stage]
        assert len(replicas) == 8 // stages
        for params in replicas[1:]:
            assert all(torch.equal(a, b) for a, b in zip(params, replicas[0]))
    losses = whole[0][2]
    assert losses[-1] < losses[0] and resumed[0][2] == losses[5:]
    elements = sum(p.numel() for p in whole[0][1])
    assert whole[0][3] < elements * 4 / 2  # an exact step sends twice 3/4 or 1/2 of 4 bytes each


def test_the_example_runs_its_old_configuration_and_resumes(engines, tmp_path):
    for saved, loaded, steps in engines(2, runs.example, str(tmp_path)):
        assert saved["phase"] == "compressed" and steps == 44
        assert_same(saved, loaded)
