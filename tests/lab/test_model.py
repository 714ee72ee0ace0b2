"""The time model against print: its inputs, what counts, contradictions, and verdicts."""

from dataclasses import replace
from math import inf

import pytest

from onebit.lab.bench.model import papers, points
from onebit.lab.bench.model.check import LIMIT, Check, check, contradictions
from onebit.lab.bench.model.papers import ADAM_PAPER, LAMB_PAPER, PRETRAINING, Setting
from onebit.lab.bench.model.points import INPUT, Point
from onebit.lab.claims import CLAIMS
from onebit.lab.claims import by_model as judging
from onebit.time_model import ADAM, COMPRESSED

ETHERNET_64 = Setting(ADAM_PAPER, PRETRAINING, "Ethernet", 64, 4096)


@pytest.fixture(scope="module")
def found():
    return check()


def test_an_all_reduce_over_ethernet_takes_what_iperf_allows():
    # 2 * 63 / 64 * 680 MB over 4.1 Gbit/s
    seconds = papers.predicted_seconds(ADAM, ETHERNET_64, known=0.0)
    assert seconds == pytest.approx(2.6122, rel=1e-4)


def test_a_compressed_exchange_crosses_a_nodes_link_as_often_as_its_ranks_send():
    # there: each of 4 ranks to 60 others elsewhere, 0.66 MB; back: a ring of 63 rounds
    there_and_back = (4 * 60 + 63) * papers.messages(64).message * 8 / 4.1e9
    compression = (173.2 + 104 / 64) * 340e6 / 900e9
    seconds = papers.predicted_seconds(COMPRESSED, ETHERNET_64, known=0.0)
    assert seconds == pytest.approx(there_and_back + compression, rel=1e-3)


def test_computation_is_that_of_the_table():
    row = papers.profile(ADAM_PAPER).iloc[2]  # 64 GPUs, batch 4,096, 16 a GPU, 4 times
    assert (row.gpus, row.batch, row.accumulation) == (64, 4096, 4)
    assert papers.compute(ETHERNET_64) == pytest.approx(row.compute_ms / 1e3, rel=0.02)


def test_the_speed_of_a_link_comes_from_no_point_that_it_predicts(monkeypatch):
    tables = {paper: papers.profile(paper).copy() for paper in papers.PROFILES}
    before = papers.between_bandwidth("InfiniBand", LAMB_PAPER)
    tables[LAMB_PAPER]["allreduce_ms"] *= 2
    monkeypatch.setattr(papers, "profile", tables.__getitem__)
    papers.between_bandwidth.cache_clear()
    try:
        assert papers.between_bandwidth("InfiniBand", LAMB_PAPER) == before
        halved = papers.between_bandwidth("InfiniBand", ADAM_PAPER)
    finally:
        papers.between_bandwidth.cache_clear()
    assert halved == pytest.approx(papers.shown_bandwidth(tables[LAMB_PAPER].iloc[-4]), rel=0.3)


def test_inputs_are_met_exactly_and_never_counted(found):
    inputs = [point for point in found.points if point.apart == INPUT]
    assert len(inputs) == 4 and all(point.error < 1e-9 for point in inputs)
    assert all(point.error > 1e-9 and not point.apart for point in found.counted)


def test_the_model_may_judge(found):
    assert found.may_judge and found.median_error <= LIMIT
    assert len(found.counted) > 100


def test_every_figure_and_table_about_time_is_compared(found):
    places = {point.place for point in found.points}
    lamb = {f"1-bit LAMB, {name}" for name in ("Table 4", "Table 5", "Figure 3", "Figure 7")}
    figures = {"Figure 4b", "Figure 5a", "Figure 5b", "Figure 5c", "Figure 9", "Table 1"}
    assert figures | lamb <= places


def made_up(place, printed, quantity=("same",), predicted=100.0, **changes):
    return Point(place, "a", "b", 1.0, "x", printed, predicted, quantity, **changes)


def test_numbers_that_print_one_quantity_twice_are_marked_if_they_differ():
    numbers = [made_up("A", 100), made_up("B", 114), made_up("C", 120), made_up("D", 500, ())]
    assert contradictions(numbers) == {0: "C: 120 x", 2: "A: 100 x"}


def test_the_papers_contradict_themselves_on_64_gpus(found):
    marked = [found.points[i] for i in found.contradicted]
    same = [p for p in marked if p.quantity == ("Adam", points.pretraining())]
    assert sorted(round(point.printed) for point in same) == [992, 1096, 1508]


def test_an_error_is_the_same_in_both_directions():
    assert made_up("A", 50).error == made_up("A", 200).error == 1.0


@pytest.mark.parametrize(
    ("prediction", "accepts", "verdict"),
    [
        (4.0, (3.0, inf), "reproduced by model"),
        (3.2, (3.0, inf), "partly by model"),
        (2.8, (3.0, inf), "partly by model"),
        (2.0, (3.0, inf), "not reproduced by model"),
    ],
)
def test_a_verdict_asks_that_the_whole_interval_lies_in_the_range(prediction, accepts, verdict):
    assert judging.judge("X", prediction, accepts, trusted=True).verdict == verdict
    assert judging.judge("X", prediction, accepts, trusted=False).verdict == "not judged"


def test_a_model_that_is_too_far_off_judges_nothing():
    far = Check((made_up("A", 100, predicted=120.0),), {})
    assert not far.may_judge
    assert {judgement.verdict for judgement in judging.judge_all(far)} == {"not judged"}


def test_the_claims_that_are_judged_are_those_that_need_a_cluster():
    claims = {claim.name: claim for claim in CLAIMS}
    assert {claims[name].profile for name in judging.PREDICTIONS} == {"paper"}


def test_the_report_is_what_the_papers_numbers_say(found):
    assert judging.FILE.read_text(encoding="utf-8") == judging.report(found), (
        "make claims writes it"
    )


def test_a_point_that_does_not_count_changes_no_error(found):
    more = Check((*found.points, replace(found.points[0], printed=1e9, apart="x")), {})
    less = Check(found.points, {})
    assert more.median_error == less.median_error
