"""The figure on when freezing fails: what it measures, and what docs/using.md says of it."""

import pandas as pd
import pytest
from helpers import synthetic

from onebit.lab.claims.bert import MARGIN
from onebit.lab.report.freezing import (
    ENOUGH_MEMORIES,
    HARMLESS_GROWTH,
    TASKS,
    frozen_runs,
    growth,
)
from onebit.lab.runs.metadata import ROOT


@pytest.fixture(scope="module")
def committed():
    """The committed runs at laptop."""
    rows = frozen_runs()
    return rows[rows.profile == "laptop"]


def test_growth_is_the_largest_mean_after_the_freeze_over_the_value_there():
    """2 at the freeze, then 3 for half of the run, with one outlier that a mean takes out."""
    norm = pd.Series([2.0] * 50 + [3.0] * 50, index=range(1, 101))
    norm[75] = 6.0
    assert growth(norm, 50) == pytest.approx((9 * 3 + 6) / 10 / 2)
    assert growth(norm[norm.index != 75], 50) == pytest.approx(1.5)
    falling = pd.Series([4.0] * 50 + [1.0] * 50, index=range(1, 101))
    assert growth(falling, 50) == pytest.approx(0.25)


def test_a_run_is_measured_by_the_adam_of_its_seed(tmp_path):
    """||v||_1 of Adam doubles in 100 steps at seed 1 and stands still at seed 2; T_w is 40."""
    for seed, ratio in ((1, 2 ** (1 / 10)), (2, 1.0)):
        synthetic.write(tmp_path, "adam", seed, 4.0, ratio=ratio)
        synthetic.write(tmp_path, "onebit_adam", seed, 4.4)
    synthetic.write(tmp_path, "onebit_adam", 3, 4.4)  # without Adam
    rows = frozen_runs(tmp_path).set_index("seed")
    assert list(rows.index) == [1, 2] and rows.gap.to_numpy() == pytest.approx([0.1, 0.1])
    assert rows.growth[2] == pytest.approx(1)
    # the last tenth, steps 181 to 200, is on average 150.5 steps after the freeze
    assert rows.growth[1] == pytest.approx(2**1.505, rel=0.01)
    assert rows.memories[1] == pytest.approx(40 * 0.02)  # 1 - beta2 at laptop


def test_the_guide_says_what_the_committed_runs_say(committed):
    text = (ROOT / "docs/using.md").read_text()
    assert f"{len(committed)} runs of seven tasks" in text and committed.task.nunique() == 7
    free = committed[~committed.clipped]
    small, large = free[free.growth < HARMLESS_GROWTH], free[free.growth >= HARMLESS_GROWTH]
    assert len(small) and (small.gap <= MARGIN).all()
    enough = large.memories >= ENOUGH_MEMORIES
    assert (large[enough].gap <= MARGIN).all() and (large[~enough].gap > MARGIN).all()
    assert set(committed[committed.clipped].task) == {"SQuAD", "SST-2", "STS-B"}
    assert set(committed.task) <= set(TASKS.values())
