"""Adam with a quantized variance, Figure 12 of "1-bit Adam"."""

from functools import partial

import numpy as np
import pytest
from helpers.cases import more
from helpers.reference_runs import (
    WORLD_SIZES,
    gradients_of_all,
    joined,
    reference_of,
    reference_options,
    segments,
    start_values,
    train,
)
from helpers.small_runs import everything, make, resumed, same, saved, step
from helpers.variance_runs import ODD_SHAPES, QSGD, adam_on_mean_squares, assert_equals

from onebit import QuantizedVarianceAdam, reference
from onebit.comm import run_threads
from onebit.compression import Identity, Quantize, Sign
from onebit.layout import Layout, round_up


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"variance_compressor": QSGD[4]},
        *more({"variance_compressor": QSGD[8]}, {"variance_compressor": QSGD[16]}),
        {},
        {
            "variance_compressor": QSGD[8],
            "compressor": partial(Quantize, bits=4, stochastic=True, seed=3),
        },
        {
            "variance_compressor": partial(Quantize, bits=8),
            "bias_correction": False,
            "max_grad_norm": 5.0,
        },
        {"variance_compressor": Identity, "compressor": Identity},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_adam_with_a_quantized_variance_equals_its_reference(ranks, options, large_eps):
    """The random draws of step t are those of round t - 1.

    The variance's come from stream 1, the momentum's from stream 0.
    """
    history = run_threads(ranks, lambda c: train(c, QuantizedVarianceAdam, options))
    told = {
        "bias_correction": options.get("bias_correction", True),
        "max_norm": options.get("max_grad_norm"),
    }
    assert_equals(
        history,
        reference.quantized_variance_adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            Q=reference_of(options.get("variance_compressor", QSGD[8]), ranks, stream=1),
            C=reference_of(options.get("compressor", Sign), ranks),
            **reference_options(),
            **told,
        ),
    )


def test_16_bits_follow_adam_and_4_bits_do_not():
    """What Figure 12 shows: few bits round most of a tensor's variance to zero, and x moves by
    m / eps there.
    """

    def distance(bits):
        options = {"compressor": Identity, "variance_compressor": QSGD[bits]}
        history = run_threads(2, lambda c: train(c, QuantizedVarianceAdam, options))[0]
        return max(
            np.abs(ours["x"] - exact).max() for ours, exact in zip(history, adam_on_mean_squares(2))
        )

    moved = max(np.abs(x - joined(start_values())).max() for x in adam_on_mean_squares(2))
    assert distance(16) < moved < 1e-3 * distance(4)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_step_with_a_quantized_variance_sends_one_and_n_bits(ranks, bits):
    """16 bytes of agreement, then rows of 1/8 and n/8 bytes an element and a scale for each
    piece, there and back: 5 calls.
    """

    def run(communicator):
        run = make(communicator, QuantizedVarianceAdam, ODD_SHAPES, variance_compressor=QSGD[bits])
        step(run, 0, communicator.rank)
        return run.optimizer.communication.last_step

    layout = Layout(ODD_SHAPES, ranks)
    pieces = layout.worker_partition().piece_lengths.shape[1]
    rows = sum(round_up(layout.chunk * n // 8 + 4 * pieces, 16) for n in (1, bits))
    for last in run_threads(ranks, run):
        assert last.bytes_sent == last.bytes_received == (ranks - 1) * (16 + 2 * rows)
        assert last.calls == (5 if ranks > 1 else 0)


def test_the_random_draws_of_a_resumed_run_go_on():
    """The second half of a run that was saved makes the second half's random draws.

    With those of the first it would end elsewhere.
    """

    def run(communicator):
        straight = make(
            communicator, QuantizedVarianceAdam, ODD_SHAPES[:3], variance_compressor=QSGD[4]
        )
        for t in range(10):
            step(straight, t, communicator.rank)
            if t == 4:
                params, state = (
                    [p.detach().clone() for p in straight.params],
                    saved(straight.optimizer),
                )
        ends = [everything(straight)]
        for rounds in (None, 0):
            other = resumed(
                communicator, params, state, kind=QuantizedVarianceAdam, variance_compressor=QSGD[4]
            )
            if rounds is not None:
                for allreduce in other.optimizer._run.variance_allreduces.values():
                    allreduce.rounds = rounds
            for t in range(5, 10):
                step(other, t, communicator.rank)
            ends.append(everything(other))
        return same(ends[0], ends[1]), same(ends[0], ends[2])

    assert run_threads(2, run) == [(True, False)] * 2
