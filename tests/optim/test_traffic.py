"""What an optimizer says that it has sent, in both phases."""

import math

import pytest
from helpers.small_runs import make, step

from onebit.comm import run_threads


@pytest.mark.report("R01")
def test_phase_and_bytes_change_at_the_stated_step():
    def run(communicator):
        run = make(communicator, shapes=((300, 40), (777,)), warmup=10)
        phases, sent, calls = [], [], []
        for t in range(20):
            phases.append(run.optimizer.phase)
            step(run, t, communicator.rank)
            last = run.optimizer.communication.last_step
            sent.append(last.bytes_sent)
            calls.append(last.calls)
        return phases, sent, calls, run.optimizer.communication, communicator

    for phases, sent, calls, total, communicator in run_threads(4, run):
        assert phases == ["warmup"] * 10 + ["compressed"] * 10
        assert len(set(sent[:10])) == 1 and len(set(sent[10:])) == 1
        assert sent[10] <= sent[0] / 14 and calls[10:] == [3] * 10
        assert (total.bytes_sent, total.calls) == (sum(sent), sum(calls))
        # At the first step and at the freeze a digest of 32 bytes goes to each other rank; at the
        # first step also a byte for each parameter, whether it has a gradient, and 4 bytes.
        comparing_the_ranks = 2 * 3 * 32 + 3 * (2 + 4)
        assert (
            communicator.bytes_sent == total.bytes_sent + comparing_the_ranks
            and communicator.calls == total.calls + 3
        )
        assert total.last_step.compression_ratio > 25
        with pytest.raises(AttributeError):
            total.bytes_sent = 0


def test_a_compressed_step_sends_at_most_a_thirtieth_for_a_model_of_1_m_parameters():
    shapes = (
        (30_522 // 8, 128),
        *((128, 128), (128,), (512, 128), (512,), (128, 512), (128,), (128,), (128,)) * 3,
    )
    assert sum(map(math.prod, shapes)) > 900_000

    def run(communicator):
        run = make(communicator, shapes=shapes, warmup=2)
        sent = []
        for t in range(3):
            step(run, t, communicator.rank)
            sent.append(run.optimizer.communication.last_step.bytes_sent)
        return sent

    for _, warmup, compressed in run_threads(4, run):
        assert warmup >= 2 * 3 / 4 * 4 * sum(map(math.prod, shapes))
        assert compressed <= warmup / 30
