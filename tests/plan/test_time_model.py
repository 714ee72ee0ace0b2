"""The time model: hand-computed times, and messages as long as the real ones."""

import pytest
import torch
from helpers.cases import holds_for_each

import onebit
from onebit.comm import run_threads
from onebit.compression import Sign
from onebit.layout import Layout
from onebit.optim.step_sets import step_sets
from onebit.time_model import (
    ADAM,
    COMPRESSED,
    Cluster,
    Link,
    Model,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    compressed_bytes,
    dense_bytes,
    equal_tensors,
    message_bytes,
    step_bytes,
    step_seconds,
    zero_one,
)
from onebit.time_model import onebit as onebit_method

FAST, SLOW = Link(8e9), Link(8e6)  # a byte in 1 ns, in 1 us
TWO_BY_TWO = Cluster(2, 2, FAST, SLOW)


def test_a_ring_crosses_the_link_of_a_node_once_whatever_the_ranks_in_it():
    # 2 * 3 rounds of 1 MB, 1 s each on the slow link
    assert all_reduce_seconds(TWO_BY_TWO, 4e6) == pytest.approx(6.0)
    assert all_gather_seconds(TWO_BY_TWO, 1e6) == pytest.approx(3.0)


def test_in_an_all_to_all_the_ranks_of_a_node_share_its_link():
    # each of 2 ranks sends 1 MB to each of 2 ranks elsewhere
    assert all_to_all_seconds(TWO_BY_TWO, 1e6) == pytest.approx(4.0)


def test_on_one_node_only_the_inside_links_count():
    node = Cluster(1, 4, FAST, SLOW)
    assert all_to_all_seconds(node, 1e6) == pytest.approx(3e-3)
    assert all_reduce_seconds(node, 4e6) == pytest.approx(6e-3)


def test_every_message_pays_the_latency_once():
    late = Cluster(4, 1, FAST, Link(1e15, latency=1e-3))
    assert all_reduce_seconds(late, 4) == pytest.approx(6e-3)
    assert all_gather_seconds(late, 4) + all_to_all_seconds(late, 4) == pytest.approx(6e-3)


def test_one_rank_exchanges_nothing():
    alone = Cluster(1, 1, FAST, SLOW)
    model = Model.of([(1000,)], 1)
    assert step_seconds(ADAM, alone, model, 0.5) == 0.5
    assert step_bytes(COMPRESSED, alone, model) == 0


SHAPES = [[(1,)], [(1000,), (64,), (3, 70)], [(0,), (65,), (0, 3), (4097,)], [(7,)] * 40]


@holds_for_each([(shapes, ranks) for shapes in SHAPES for ranks in (1, 2, 3, 8)])
def test_a_message_is_as_long_as_the_compressors(shapes, ranks):
    compressor = Sign(Layout(shapes, ranks).worker_partition(), torch.float32)
    assert message_bytes(shapes, ranks) == compressor.row_bytes


def two_steps(communicator):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES[1]]
    optimizer = onebit.OneBitAdam(parameters, warmup=1, communicator=communicator)
    sent = []
    for _ in range(2):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        sent.append(optimizer.communication.last_step.bytes_sent)
    return sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bytes_of_a_step_are_those_that_the_optimizer_counts(ranks):
    warm, compressed = run_threads(ranks, two_steps)[0]
    cluster = Cluster(ranks, 1, FAST, SLOW)
    model = Model.of(SHAPES[1], ranks, gradient_bytes=4)
    # all_reduce pads its vector to whole chunks of ranks, and agrees as a compressed step does
    assert abs(warm - dense_bytes(cluster, model)) <= 64 * 4 * 4 * ranks
    assert compressed == compressed_bytes(cluster, model)


def test_a_step_of_adam_hides_what_it_can_and_no_more():
    model = Model.of([(2_000_000,)], 4)  # 4 MB of half precision: 6 s, as above
    assert step_seconds(ADAM, TWO_BY_TWO, model, 1.0) == pytest.approx(7.0)
    assert step_seconds(ADAM, TWO_BY_TWO, model, 1.0, hidden=0.5) == pytest.approx(6.5)
    assert step_seconds(ADAM, TWO_BY_TWO, model, 9.0, hidden=8.0) == pytest.approx(9.0)


def test_the_mean_over_the_run_weighs_the_stages():
    model = Model.of([(2_000_000,)], 4)
    adam, compressed = (step_seconds(m, TWO_BY_TWO, model, 1.0) for m in (ADAM, COMPRESSED))
    mean = step_seconds(onebit_method(0.25), TWO_BY_TWO, model, 1.0)
    assert mean == pytest.approx(0.25 * adam + 0.75 * compressed)


def test_zero_one_adam_exchanges_at_the_steps_of_its_sets():
    options = {"variance_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
    updates, syncs = step_sets(200, variance_freeze_step=50, **options)
    stages = zero_one(200, 50, **options)
    assert sum(s.share for s in stages) == pytest.approx(1.0)
    assert sum(s.share for s in stages if s.dense) == pytest.approx(len(updates) / 200)
    assert sum(s.share for s in stages if s.compressed) == pytest.approx(len(syncs) / 200)


def test_equal_tensors_hold_all_parameters():
    assert equal_tensors(10, 3) == [(4,), (3,), (3,)]
    with pytest.raises(ValueError, match="ask for 1 to 10"):
        equal_tensors(10, 11)


def test_impossible_clusters_and_shares_are_refused():
    with pytest.raises(ValueError, match="at least one node"):
        Cluster(0, 4, FAST, SLOW)
    with pytest.raises(ValueError, match="between 0 and 1"):
        onebit_method(1.5)
