"""The comparison with DeepSpeed 0.19.6: what is committed is complete, and its rules can fail."""

from itertools import product

import pytest

from onebit.lab.report.artifact import load_module
from onebit.lab.runs import measurements
from onebit.lab.runs.load import RESULTS


@pytest.fixture(scope="module")
def beside():
    return load_module("beside_deepspeed")


@pytest.fixture(scope="module")
def curves():
    return measurements.read(RESULTS, "deepspeed", "beside_deepspeed")[0]


@pytest.fixture(scope="module")
def times():
    return measurements.read(RESULTS, "speed", "beside_deepspeed_times")[0]


def test_the_committed_comparison_is_complete(beside, curves, times):
    wanted = set(product(beside.SIDES, beside.KINDS, beside.SEEDS))
    found = curves.groupby(["side", "optimizer", "seed"]).step.agg(["max", "size"])
    assert set(found.index) == wanted and len(beside.SEEDS) >= 3
    assert (found["max"] == beside.STEPS).all()
    assert (found["size"] == beside.STEPS / beside.BLOCK).all()
    timed = set(times[["side", "optimizer", "n"]].itertuples(index=False, name=None))
    assert timed == set(product(beside.TIMED, beside.KINDS, beside.SIZES))


def test_each_rule_of_the_comparison_can_fail(beside, curves, times):
    held = [line[-1] for line in beside.judge(curves) + beside.judge_times(times)]
    ours = curves.side != "old"
    late = curves.step > beside.WARMUP
    slow = times.assign(ratio=1.5)
    worse = curves.assign(loss=curves.loss.where(~(ours & late), 1.05 * curves.loss))
    other = curves.assign(loss=curves.loss.where(~ours | late, 1.02 * curves.loss))
    last, warm = [line[-1] for line in beside.judge(worse)], beside.judge(other)
    assert set(held) <= {"yes", "no"}
    assert last[:6] == ["no"] * 6 and [line[-1] for line in warm[6:]] == ["no"] * 2
    assert {line[-1] for line in beside.judge_times(slow)} == {"no"}


def test_the_committed_table_is_what_the_code_writes(beside, tmp_path):
    for folder, name in (("deepspeed", beside.NAME), ("speed", beside.TIMES)):
        (tmp_path / folder).mkdir()
        for kind in ("csv", "json"):
            path = f"{folder}/{name}.{kind}"
            (tmp_path / path).write_bytes((RESULTS / path).read_bytes())
    (tmp_path / "figures").mkdir()
    beside.write_table(tmp_path)
    table = f"figures/{beside.NAME}.md"
    assert (tmp_path / table).read_text() == (RESULTS / table).read_text()
