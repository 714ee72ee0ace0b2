"""A claim at several profiles: the largest that was run decides, and the others stand beside."""

from dataclasses import fields
from math import log

import pandas as pd
import pytest
from helpers import synthetic

from onebit.lab.claims import CLAIMS
from onebit.lab.claims.judge import (
    WORKSTATION_SEEDS,
    Judgement,
    at_profiles,
    judge,
    largest,
    report,
    summary,
    verdict,
)
from onebit.lab.claims.statistics import Interval, least_detectable, tail_median
from onebit.lab.claims.zero_one_adam import with_rounds
from onebit.lab.runs.load import load
from onebit.optim.step_sets import StepSets, step_sets


@pytest.fixture(scope="module")
def papers_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    synthetic.write_language_models(root)
    return root


BY_NAME = {claim.name: claim for claim in CLAIMS}


def judged(claim, gap, seeds, half=0.001):
    interval = Interval(gap, gap - half, gap + half, seeds)
    fewest = WORKSTATION_SEEDS if claim.profile == "workstation" else 3
    return Judgement(claim, interval, verdict(interval, claim.accepts, fewest), "")


def test_the_largest_profile_with_enough_seeds_decides_and_the_others_stand_beside():
    paper, workstation, laptop = at_profiles(BY_NAME["C1"])
    assert [c.profile for c in (paper, workstation, laptop)] == ["paper", "workstation", "laptop"]
    none = Judgement(paper, Interval(0.0, 0.0, 0.0, 0), "needs a cluster", "")
    found = largest([none, judged(workstation, 0.0, WORKSTATION_SEEDS), judged(laptop, 0.2, 4)])
    assert (found.claim.profile, found.verdict) == ("workstation", "reproduced")
    assert found.beside_text().startswith("laptop: not reproduced, +20.0%")


def test_too_few_seeds_of_the_larger_profile_decide_nothing_but_are_shown():
    _, workstation, laptop = at_profiles(BY_NAME["C1"])
    few = judged(workstation, 0.0, WORKSTATION_SEEDS - 1)
    found = largest([few, judged(laptop, 0.2, 4)])
    assert (found.claim.profile, found.verdict) == ("laptop", "not reproduced")
    assert found.beside_text().startswith("workstation: not judged")


def test_a_rule_that_changed_keeps_its_old_form_in_the_report():
    _, workstation, laptop = at_profiles(BY_NAME["L4"])
    found = largest([judged(workstation, 9.0, 8), judged(laptop, 29.8, 3)])
    assert laptop.rule in found.beside_text() and laptop.rule != found.claim.rule


def test_a_claim_of_a_workstation_is_not_asked_of_a_laptop():
    assert [claim.profile for claim in at_profiles(BY_NAME["T11"])] == ["paper", "workstation"]


def test_claims_that_no_paper_makes_are_counted_apart():
    beyond = {claim.name for claim in CLAIMS if claim.beyond}
    assert beyond == {f"T{number}" for number in range(3, 11)}
    judgements = [judged(claim, 5.0, 8) for claim in CLAIMS]
    papers, others = report(judgements).split("## Beyond the papers")
    assert "| T3 |" in others and "| T3 |" not in papers
    assert summary(judgements).startswith(f"Of {len(CLAIMS) - 8} claims")


def test_only_coefficients_off_the_bounds_of_the_clip_count_at_workstation():
    """Two tensors lie on 0.01 and 0.3; the two between are a factor of 2 apart."""
    step = range(1, 11)
    levels = {"a": 0.01, "b": 0.3, "c": 0.05, "d": 0.1}
    rows = pd.DataFrame(
        {"optimizer": "lamb", "status": "finished", "seed": 1, "step": step, "total_steps": 10}
        | {f"coefficient:{name}": level for name, level in levels.items()}
        | {"variance:a": 1.0}
    )
    claim = BY_NAME["L4"]
    assert claim.statistic(rows)[1] == pytest.approx(30)
    assert claim.at("workstation").statistic(rows)[1] == pytest.approx(2)
    clipped = rows.drop(columns=["coefficient:c", "coefficient:d"])
    assert claim.at("workstation").statistic(clipped)[1] == 1


def test_what_falls_behind_is_averaged_in_logarithms_at_workstation(tmp_path):
    """The same ratio of 1.2 at each seed is log 1.2."""
    synthetic.write_images(tmp_path, seeds=(1, 2, 3), adam_variance_16bit=1.2)
    rows = load(tmp_path, "figure_06", "laptop")
    claim = BY_NAME["C17"].at("workstation")
    assert claim.statistic(rows).to_numpy() == pytest.approx([log(1.2)] * 3)
    assert claim.accepts[0] == pytest.approx(log(1.1))
    # at the profile workstation three seeds are too few
    assert judge(claim, rows).verdict == "not judged"


def test_rounds_are_the_steps_with_an_exchange(papers_runs):
    """0/1 Adam's as its options say; Adam and 1-bit Adam exchange in every step."""
    rows = with_rounds(load(papers_runs, "zero_one_adam", "laptop"))
    adam, sparse = (rows[rows.optimizer == name] for name in ("adam", "zero_one_adam"))
    assert (adam.rounds == adam.step).all()
    options = synthetic.config("zero_one_adam", "zero_one_adam")["optimizer"]
    names = [option.name for option in fields(StepSets)]
    _, syncs = step_sets(synthetic.STEPS, **{name: options[name] for name in names})
    for _, run in sparse.groupby("seed"):
        assert run.rounds.iloc[-1] == len(syncs) < synthetic.STEPS
        assert run.rounds.iloc[4] == len([t for t in syncs if t <= run.step.iloc[4]])


def test_the_median_of_the_tail_does_not_follow_a_spike():
    rows = pd.DataFrame(
        {"optimizer": "adam", "seed": 1, "step": range(1, 11), "total_steps": 10, "loss": 1.0}
    )
    rows.loc[9, "loss"] = 50.0
    assert tail_median(rows, "adam", "loss", 0.3)[1] == 1.0


def test_the_least_detectable_difference_is_what_the_t_test_finds_with_the_power():
    """n = 6, s = 1: the half-width is 2.571 / sqrt(6) = 1.049; t_{0.8, 5} = 0.920."""
    assert least_detectable(Interval(0.0, -1.0494, 1.0494, 6)) == pytest.approx(
        (2.5706 + 0.9195) / 6**0.5, rel=1e-3
    )
