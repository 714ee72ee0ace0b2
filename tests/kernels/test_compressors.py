"""The contract of a compressor, kept by every one that `onebit.compression` has; and 1-bit Adam with each equals its reference."""

from functools import partial

import numpy as np
import pytest
import torch
from test_allreduce import rounds
from test_optimizers import SHAPES as OPTIMIZER_SHAPES
from test_optimizers import (
    T_W,
    WORLD_SIZES,
    assert_equals_reference,
    gradients_of_all,
    joined,
    reference_options,
    segments,
    start_values,
    train,
)

import onebit
from onebit import compression, reference
from onebit.compression import Identity, Quantize, Sign, TopK
from onebit.kernels.torch_ops import Terms
from onebit.layout import Layout

SHAPES = [
    (1,),
    (7,),
    (9, 7),
    (64,),
    (0,),
    (),
    (65,),
    (1000,),
    (2, 300),
]  # with 3 ranks the chunks' edges cut the last two
BITS = (2, 4, 8, 16)
OPTIONS = {
    "Quantize": [
        {"bits": bits, "norm": norm, "stochastic": stochastic}
        for bits in BITS
        for norm in ("max", "l2")
        for stochastic in (False, True)
    ],
    "TopK": [{"density": density} for density in (0.001, 0.05, 0.5, 1.0)],
}


def registered():
    """Every compressor of the package, with its defaults and with the options above."""
    for name in compression.__all__:
        kind = getattr(compression, name)
        if kind is not compression.Compressor:
            yield kind
            yield from (partial(kind, **options) for options in OPTIONS.get(name, ()))


def named(compressor):
    return (
        " ".join([compressor.func.__name__, *map(str, compressor.keywords.values())])
        if isinstance(compressor, partial)
        else compressor.__name__
    )


every_compressor = pytest.mark.parametrize("compressor", list(registered()), ids=named)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def masked(layout):
    """A mask that also empties a whole tensor."""
    active = layout.real & (torch.arange(layout.size) % 5 > 0)
    layout.views(active)[3].fill_(False)
    return active


def partitions(ranks, active=None):
    """(partition, the part of the vector that is its), of the worker and of each server."""
    layout = Layout(SHAPES, ranks)
    worker = layout.worker_partition(active)
    return [
        (worker, slice(None)),
        *((layout.server_partition(rank, worker), layout.chunk_of(rank)) for rank in range(ranks)),
    ]


def vectors(layout, dtype, active):
    """Zero; normally distributed; one large element among small ones; all equal; whole numbers, many of them equal. 0 where not active."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(layout.size, generator=generator, dtype=torch.float64)
    spiked = torch.where(torch.arange(layout.size) % 61 == 7, 1e3, 1e-2 * normal)
    for x in (
        torch.zeros_like(normal),
        normal,
        spiked,
        torch.full_like(normal, 0.3),
        (2 * normal).round(),
    ):
        yield torch.where(active, x, 0).to(dtype)


def drawing(seed=0):
    return torch.Generator().manual_seed(seed)


def group_norms(partition, x):
    return torch.stack([part.double().norm() for part in x.split(partition.lengths.tolist())])


@every_compressor
@both_dtypes
@pytest.mark.parametrize("ranks, everywhere", [(1, True), (3, False)])
def test_the_error_stays_within_the_stated_bound(compressor, dtype, ranks, everywhere):
    """||C[x] - x|| <= q ||x|| in every group, of worker and servers; C[x] is 0 where not active. By lot: the mean square of 30 draws."""
    layout = Layout(SHAPES, ranks)
    active = layout.real if everywhere else masked(layout)
    for partition, own in partitions(ranks, active):
        made = compressor(partition, dtype)
        q, draws = made.error_bound(), 1 if made.seed is None else 30
        assert q.shape == partition.counts.shape and q.dtype == torch.float64
        for x in (x[own] for x in vectors(layout, dtype, active)):
            errors = []
            for draw in range(draws):
                y = made.decompress(made.compress(x, drawing(draw)))
                assert y.shape == x.shape and y.dtype == dtype and not y[~active[own]].any()
                errors.append(group_norms(partition, y - x))
            mean_square = torch.stack(errors).square().mean(0)
            limit = (q * group_norms(partition, x)).square()
            assert (
                mean_square
                <= (1.3 if draws > 1 else 1) * limit + 1e-12 * group_norms(partition, x).square()
            ).all()


@every_compressor
@both_dtypes
def test_a_row_has_the_bytes_that_it_promises(compressor, dtype):
    """The worker's rows and every server's, so that each reads what the other wrote; and a stack of payloads is read as one."""
    layout = Layout(SHAPES, 3)
    (worker, _), *servers = partitions(3)
    made = compressor(worker, dtype)
    payloads = [made.compress(x, drawing()) for x in vectors(layout, dtype, layout.real)]
    for payload in payloads:
        assert payload.dtype == torch.uint8 and payload.shape == (3, made.row_bytes)
        read = made.decompress(payload)
        for rank, (server, own) in enumerate(servers):
            other = compressor(server, dtype)
            assert other.row_bytes == made.row_bytes
            assert torch.equal(other.decompress(payload[rank : rank + 1]), read[own])
            assert other.compress(read[own], drawing()).shape == (1, made.row_bytes)
    assert torch.equal(
        made.decompress(torch.stack(payloads)),
        torch.stack([made.decompress(payload) for payload in payloads]),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_by_hand(ranks):
    """n bits an element and a scale for each piece; 8 or 12 bytes for each element of the largest and for each piece."""
    partition, _ = partitions(ranks)[0]
    pieces = max(int((row > 0).sum()) for row in partition.piece_lengths)
    for bits in BITS:
        assert (
            Quantize(partition, torch.float32, bits=bits).row_bytes
            == partition.row_elements * bits // 8 + 4 * pieces
        )
        assert (
            Quantize(partition, torch.float64, bits=bits).row_bytes
            == partition.row_elements * bits // 8 + 8 * pieces
        )
    for density in (0.01, 0.3):
        sent = -int(-density * partition.row_elements // 1) + pieces
        assert TopK(partition, torch.float32, density=density).row_bytes == 8 * sent
        assert TopK(partition, torch.float64, density=density).row_bytes == 12 * sent


@every_compressor
@both_dtypes
def test_zero_stays_zero_and_twice_the_input_is_twice_the_output(compressor, dtype):
    """With the same random draws, since a power of two changes no rounding; so the unit of the momentum does not matter."""
    layout = Layout(SHAPES, 2)
    made = compressor(layout.worker_partition(), dtype)
    zero, *others = vectors(layout, dtype, layout.real)
    assert not made.decompress(made.compress(zero, drawing())).any()
    for x in others:
        assert torch.equal(
            made.decompress(made.compress(2 * x, drawing())),
            2 * made.decompress(made.compress(x, drawing())),
        )


@every_compressor
def test_what_has_no_negative_element_comes_out_without_one(compressor):
    """So a compressed variance has a square root."""
    layout = Layout(SHAPES, 2)
    made = compressor(layout.worker_partition(), torch.float32)
    for x in vectors(layout, torch.float32, layout.real):
        assert (made.decompress(made.compress(x.abs(), drawing())) >= 0).all()


@every_compressor
@both_dtypes
def test_what_is_not_finite_is_not_hidden(compressor, dtype):
    layout = Layout([(70,), (3,)], 1)
    made = compressor(layout.worker_partition(), dtype)
    for value in (float("nan"), float("inf")):
        x = torch.ones(layout.size, dtype=dtype).where(layout.real, 0)
        x[5] = value
        assert not torch.isfinite(made.decompress(made.compress(x, drawing()))[:70]).all()


@pytest.mark.parametrize("size", WORLD_SIZES)
@every_compressor
def test_telescoping_with_every_compressor(size, compressor):
    """sum of outputs = sum of mean inputs - errors at the end, the same bits on every rank; masked elements hold nothing."""
    active = masked(Layout(SHAPES, size))
    results = onebit.comm.run_threads(
        size, lambda c: rounds(c, SHAPES, 20, compressor=compressor, active=active)
    )
    inputs = sum(r[0] for r in results) / size
    errors = sum(r[2] for r in results) / size + torch.cat([r[3] for r in results])
    for result in results:
        assert torch.equal(result[1], results[0][1]) and torch.equal(result[4], results[0][4])
        assert not result[1][~active].any() and not errors[~active].any()
    scale = max(1.0, float(errors.abs().max()))
    torch.testing.assert_close(results[0][1], inputs - errors, rtol=1e-11, atol=1e-11 * scale)


# ---- by hand


def lone(x, kind, **options):
    """C[x] of one tensor."""
    layout = Layout([(len(x),)], 1)
    flat = torch.zeros(layout.size, dtype=torch.float64)
    flat[: len(x)] = torch.tensor(x, dtype=torch.float64)
    made = kind(layout.worker_partition(), torch.float64, **options)
    return made, flat, made.decompress(made.compress(flat))[: len(x)].tolist()


def test_levels_by_hand():
    """4 bits: s = 7. Under the max norm 14 the levels are even numbers; under the l2 norm of (3, 4) they are multiples of 5/7."""
    assert lone([14.0, -13.1, 0.9, -1.1, 0.0], Quantize, bits=4)[2] == [14.0, -14.0, 0.0, -2.0, 0.0]
    assert lone([3.0, -4.0], Quantize, bits=4, norm="l2")[2] == pytest.approx(
        [4 * 5 / 7, -6 * 5 / 7]
    )
    assert lone([1.0, -0.4, 0.6], Quantize, bits=2)[2] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("bits", BITS)
def test_a_norm_that_comes_out_too_small_turns_no_sign(bits):
    """The square of 2.7e-162 is rounded down by a third, to the smallest number that there is."""
    assert 0.8 < lone([2.7e-162], Quantize, bits=bits, norm="l2")[2][0] / 2.7e-162 < 0.9


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_twos_complement_lowest_bits_first(bits):
    s = 2 ** (bits - 1) - 1
    made, flat, out = lone(
        [float(k) for k in (s, -s, 0, 1 if s > 1 else 0, -1, 0, s, s)], Quantize, bits=bits
    )
    codes = [s, -s, 0, 1 if s > 1 else 0, -1, 0, s, s]
    assert out == codes
    number = sum((code % 2**bits) << (bits * i) for i, code in enumerate(codes))
    assert made.compress(flat)[0][:bits].tolist() == list(number.to_bytes(bits, "little"))


def test_the_largest_by_hand_and_the_first_of_equals():
    assert lone([1.0, -5.0, 3.0, 5.0, -3.0, 0.0], TopK, density=0.5)[2] == [0, -5.0, 3.0, 5.0, 0, 0]
    assert lone([2.0, -2.0, 2.0], TopK, density=0.01)[2] == [2.0, 0, 0]


def test_every_piece_of_a_tensor_sends_its_largest():
    """A tensor of 128 on two ranks, all its large elements in the first half: the second half sends one of its own."""
    layout = Layout([(128,)], 2)
    made = TopK(layout.worker_partition(), torch.float32, density=1 / 64)
    x = torch.cat([torch.arange(64.0) + 100, torch.arange(64.0)])
    assert made.decompress(made.compress(x)).nonzero().flatten().tolist() == [63, 127]


# ---- random draws


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_is_right_on_average_and_to_a_neighbour(norm, bits):
    """The mean of N draws is within 5 standard errors of x, a draw's variance being at most (unit / 2)^2; no element moves by a whole unit."""
    layout = Layout([(200,)], 1)
    made = Quantize(layout.worker_partition(), torch.float64, bits=bits, norm=norm, stochastic=True)
    x = torch.randn(layout.size, generator=drawing(7), dtype=torch.float64).where(layout.real, 0)
    unit = float(x.abs().max() if norm == "max" else x.norm()) / made.levels
    draws = torch.stack([made.decompress(made.compress(x, drawing(seed))) for seed in range(2000)])
    assert ((draws - x).abs() < unit * (1 + 1e-9)).all()
    assert (draws.mean(0) - x).abs().max() <= 5 * unit / 2 / 2000**0.5
    assert (draws.mean(0) - x)[:200].std() > 0


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
        for drawn, _ in onebit.comm.run_threads(3, lambda c: draws(c, **options))
    ]  # noqa: B023
    numbers = [tuple(draw) for drawn in everyone for draw in drawn]
    assert len(numbers) == 3 * 3 * 2 * 2 and len(set(numbers)) == len(numbers)


def test_random_draws_are_a_function_of_the_round_that_was_committed():
    """Going on from round 1 draws what round 1 drew; a round that was dropped is drawn again."""
    straight, again, later, dropped = (
        onebit.comm.run_threads(2, lambda c: draws(c, **options)[0])  # noqa: B023
        for options in ({}, {}, {"rounds": 1, "count": 1}, {"drop": True})
    )
    for a, b, c, d in zip(straight, again, later, dropped):
        assert a == b and c == a[2:] and d == a[:2] * 2


def test_without_feedback_the_errors_stay_zero():
    """Sign loses something of every vector; the outputs of two equal rounds are then equal, which error feedback would make different."""

    def run(communicator, feedback):
        layout = Layout([(300,)], communicator.size)
        allreduce = onebit.allreduce.CompressedAllreduce(communicator, layout, feedback=feedback)
        x = torch.linspace(-1, 2, layout.size).where(layout.real, 0)
        first, second = (allreduce.allreduce(x.clone()) for _ in range(2))
        return (
            torch.equal(first, second),
            bool(allreduce.worker_error.any() or allreduce.server_error.any()),
            allreduce.rounds,
        )

    assert onebit.comm.run_threads(2, lambda c: run(c, False)) == [(True, False, 2)] * 2
    assert onebit.comm.run_threads(2, lambda c: run(c, True)) == [(False, True, 2)] * 2


# ---- 1-bit Adam with each of them


class Uniforms:
    """What the ranks draw for a stochastic compressor in round 0, 1, ...: u [n, d], then u [d], as the reference takes them."""

    def __init__(self, ranks, seed=0, stream=0, rounds=0):
        self.layout = Layout(OPTIMIZER_SHAPES, ranks)
        self.ranks, self.seed, self.stream, self.rounds = ranks, seed, stream, rounds

    def _numbers(self, rank, side, count):
        place = np.random.SeedSequence([self.seed, self.stream, self.rounds, rank, side])
        generator = torch.Generator().manual_seed(int(place.generate_state(1, np.uint64)[0]))
        return torch.rand(count, generator=generator, dtype=torch.float64)

    def workers(self):
        return np.stack(
            [
                joined(self.layout.views(self._numbers(rank, 0, self.layout.size)))
                for rank in range(self.ranks)
            ]
        )

    def servers(self):
        return joined(
            self.layout.views(
                torch.cat([self._numbers(rank, 1, self.layout.chunk) for rank in range(self.ranks)])
            )
        )

    def compressor(self, **options):
        """`reference.quantize` that draws them: a round is a call for the workers, then one for the servers."""

        def C(x, segments, active):
            if x.ndim == 2:
                return reference.quantize(x, segments, active, u=self.workers(), **options)
            y = reference.quantize(x, segments, active, u=self.servers(), **options)
            self.rounds += 1
            return y

        return C


def reference_of(compressor, ranks, rounds=0, stream=0):
    """The same compressor for `onebit.reference`."""
    kind, options = (
        (compressor.func, dict(compressor.keywords))
        if isinstance(compressor, partial)
        else (compressor, {})
    )
    if kind is TopK:
        return lambda x, _, active: reference.top_k(
            x, segments(ranks)[1], active, options.get("density", 0.01)
        )
    if kind is Quantize:
        told = {"levels": 2 ** (options.get("bits", 8) - 1) - 1, "norm": options.get("norm", "max")}
        if options.get("stochastic"):
            return Uniforms(ranks, options.get("seed", 0), stream, rounds).compressor(**told)
        return partial(reference.quantize, **told)
    known = {Sign: reference.one_bit, Identity: reference.identity}
    if kind not in known:
        pytest.skip(
            f"onebit.reference has no {kind.__name__}: write it there and name it here, and 1-bit Adam with it is compared, too"
        )
    return known[kind]


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@every_compressor
def test_onebit_adam_with_every_compressor_equals_its_reference(ranks, compressor):
    """The random draws of the first compressed step are those of round T_w."""
    history = onebit.comm.run_threads(
        ranks, lambda c: train(c, onebit.OneBitAdam, {"warmup": T_W, "compressor": compressor})
    )
    assert_equals_reference(
        history,
        reference.one_bit_adam(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            T_w=T_W,
            C=reference_of(compressor, ranks, T_W),
            **reference_options(),
        ),
        corrected_at=T_W,
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_of_the_elements_is_the_identity(ranks):
    """TopK of density 1 sends everything: 1-bit Adam with it is "1-bit Adam (32 bits)", bit for bit."""
    kept, plain = (
        onebit.comm.run_threads(
            ranks,
            lambda c: train(c, onebit.OneBitAdam, {"warmup": T_W, "compressor": compressor}, 40),
        )  # noqa: B023
        for compressor in (partial(TopK, density=1.0), Identity)
    )
    for a, b in zip(kept[0], plain[0], strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in "xmv")


def test_overlap_changes_no_lot():
    """An exchange that begins during backward, before the step is counted, draws what it would draw in step()."""

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
        *(onebit.comm.run_threads(2, lambda c: run(c, overlap)) for overlap in (True, False))
    ):  # noqa: B023
        np.testing.assert_array_equal(early, late)


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (partial(Quantize, bits=5), "bits among"),
        (partial(Quantize, norm="l1"), "norm among"),
        (partial(Quantize, stochastic=1), "True or False"),
        (partial(Quantize, seed=-1), "seed must be"),
        (partial(TopK, density=0), "density above 0"),
        (partial(TopK, density=1.5), "at most 1"),
    ],
)
def test_a_wrong_option_of_a_compressor_is_refused_when_the_optimizer_is_made(compressor, message):
    """Not at the freeze, when the warm-up would be lost."""
    with pytest.raises(ValueError, match=message):
        onebit.OneBitAdam(
            [torch.nn.Parameter(torch.ones(3))],
            warmup=3,
            compressor=compressor,
            communicator=onebit.comm.Single(),
        )


def test_what_makes_no_compressor_is_refused():
    with pytest.raises(TypeError, match="-> Compressor"):
        onebit.OneBitAdam(
            [torch.nn.Parameter(torch.ones(3))],
            warmup=3,
            compressor=lambda partition, dtype: None,
            communicator=onebit.comm.Single(),
        )


def test_references_by_hand():
    """quantize rounds half to even, or up where u is below the rest; top_k takes the first of equals, and neither sends a masked element."""
    everywhere, whole = np.ones(4, bool), [slice(0, 4)]
    x = np.array([14.0, -13.1, 0.9, -1.1])
    np.testing.assert_allclose(reference.quantize(x, whole, everywhere, 7), [14, -14, 0, -2])
    np.testing.assert_allclose(
        reference.quantize(x, whole, everywhere, 7, u=np.full(4, 0.5)), [14, -14, 0, -2]
    )
    np.testing.assert_allclose(
        reference.quantize(x, whole, everywhere, 7, u=np.zeros(4)), [14, -12, 2, 0]
    )
    np.testing.assert_allclose(
        reference.top_k(np.array([1.0, -3, 3, 2]), whole, everywhere, 0.25), [0, -3, 0, 0]
    )
    np.testing.assert_allclose(
        reference.top_k(np.array([1.0, -3, 3, 2]), whole, np.array([True, False, True, True]), 0.5),
        [0, 0, 3, 2],
    )
