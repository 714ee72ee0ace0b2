"""Random draws are a function of seed, stream, round, rank and side."""

from functools import partial

import numpy as np
import torch
from helpers.compressors import drawing
from helpers.reference_runs import joined

import onebit
from onebit.compression import Quantize
from onebit.kernels.torch_ops import Terms
from onebit.layout import Layout


def draws(communicator, seed=0, stream=0, rounds=0, count=2, drop=False):
    """What this rank draws in `count` rounds as a worker and as a server."""
    drawn = []

    class Spy(Quantize):
        def compress(self, x, generator=None):
            drawn.append(
                torch.rand(4, generator=torch.Generator().set_state(generator.get_state())).tolist()
            )
            return super().compress(x, generator)

    layout = Layout([(300,)], communicator.size)
    allreduce = onebit.allreduce.CompressedAllreduce(
        communicator,
        layout,
        compressor=partial(Spy, stochastic=True, seed=seed),
        stream=stream,
        rounds=rounds,
    )
    for _ in range(count):
        gathered = allreduce.exchange(
            allreduce.compress(Terms(layout.views(torch.ones(layout.size)), [1.0]))
        )
        if not drop:
            allreduce.commit()
    return drawn, gathered


def test_no_two_ranks_rounds_sides_streams_or_seeds_draw_the_same_numbers():
    """Else their errors would not average out."""
    everyone = [
        drawn
        for options in ({}, {"seed": 1}, {"stream": 1})
        for drawn, _ in onebit.comm.run_threads(3, lambda c, options=options: draws(c, **options))
    ]
    numbers = [tuple(draw) for drawn in everyone for draw in drawn]
    assert len(numbers) == 3 * 3 * 2 * 2 and len(set(numbers)) == len(numbers)


def test_random_draws_are_a_function_of_the_round_that_was_committed():
    """Going on from round 1 draws what round 1 drew; a round that was dropped is drawn again."""
    straight, again, later, dropped = (
        onebit.comm.run_threads(2, lambda c, options=options: draws(c, **options)[0])
        for options in ({}, {}, {"rounds": 1, "count": 1}, {"drop": True})
    )
    for a, b, c, d in zip(straight, again, later, dropped):
        assert a == b and c == a[2:] and d == a[:2] * 2


def test_overlap_changes_no_lot():
    """An exchange that begins during backward, before the step is counted, draws what it would
    draw in step().
    """

    def run(communicator, overlap):
        model = torch.nn.Linear(30, 7)
        for p in model.parameters():
            torch.nn.init.normal_(p, generator=drawing())
        optimizer = onebit.OneBitAdam(
            model.parameters(),
            lr=1e-2,
            warmup=3,
            compressor=partial(Quantize, bits=4, stochastic=True),
            bucket_cap_mb=5e-4,
            overlap=overlap,
            communicator=communicator,
        )
        for t in range(8):
            x = torch.randn(5, 30, generator=drawing(10 * t + communicator.rank))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return joined(model.parameters())

    for early, late in zip(
        *(
            onebit.comm.run_threads(2, lambda c, overlap=overlap: run(c, overlap))
            for overlap in (True, False)
        )
    ):
        np.testing.assert_array_equal(early, late)
