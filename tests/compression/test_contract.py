"""The contract that every compressor of `onebit.compression` keeps."""

import pytest
import torch
from helpers.allreduce_rounds import rounds
from helpers.cases import more, more_of
from helpers.compressors import COMPRESSED_SHAPES, drawing, every_compressor, masked, partitions

import onebit
from onebit.layout import Layout

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def vectors(layout, dtype, active):
    """Zero; normally distributed; one large element among small ones; all equal.

    Whole numbers, many of them equal. 0 where not active.
    """
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


def group_norms(partition, x):
    return torch.stack([part.double().norm() for part in x.split(partition.lengths.tolist())])


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.float64)])
@pytest.mark.parametrize("ranks, everywhere", [(3, False), *more_of((1, True))])
def test_the_error_stays_within_the_stated_bound(compressor, dtype, ranks, everywhere):
    """||C[x] - x|| <= q ||x|| in every group, of worker and servers; C[x] is 0 where not
    active.

    By lot: the mean square of 30 draws.
    """
    layout = Layout(COMPRESSED_SHAPES, ranks)
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
@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.float64)])
def test_a_row_has_the_bytes_that_it_promises(compressor, dtype):
    """The worker's rows and every server's, so that each reads what the other wrote.

    A multiple of 16, so that NCCL copies rows in whole words. A stack of payloads is read as one.
    """
    layout = Layout(COMPRESSED_SHAPES, 3)
    (worker, _), *servers = partitions(3)
    made = compressor(worker, dtype)
    payloads = [made.compress(x, drawing()) for x in vectors(layout, dtype, layout.real)]
    for payload in payloads:
        assert payload.dtype == torch.uint8 and payload.shape == (3, made.row_bytes)
        assert made.row_bytes % 16 == 0
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


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.float64)])
def test_zero_stays_zero_and_twice_the_input_is_twice_the_output(compressor, dtype):
    """With the same random draws, since a power of two changes no rounding.

    So the unit of the momentum does not matter.
    """
    layout = Layout(COMPRESSED_SHAPES, 2)
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
    layout = Layout(COMPRESSED_SHAPES, 2)
    made = compressor(layout.worker_partition(), torch.float32)
    for x in vectors(layout, torch.float32, layout.real):
        assert (made.decompress(made.compress(x.abs(), drawing())) >= 0).all()


@every_compressor
@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.float64)])
def test_what_is_not_finite_is_not_hidden(compressor, dtype):
    layout = Layout([(70,), (3,)], 1)
    made = compressor(layout.worker_partition(), dtype)
    for value in (float("nan"), float("inf")):
        x = torch.ones(layout.size, dtype=dtype).where(layout.real, 0)
        x[5] = value
        assert not torch.isfinite(made.decompress(made.compress(x, drawing()))[:70]).all()


@pytest.mark.parametrize("size", [3, *more(1, 2, 4)])
@every_compressor
def test_telescoping_with_every_compressor(size, compressor):
    """sum of outputs = sum of mean inputs - errors at the end, the same bits on every rank.

    Masked elements hold nothing.
    """
    active = masked(Layout(COMPRESSED_SHAPES, size))
    results = onebit.comm.run_threads(
        size, lambda c: rounds(c, COMPRESSED_SHAPES, 20, compressor=compressor, active=active)
    )
    inputs = sum(r[0] for r in results) / size
    errors = sum(r[2] for r in results) / size + torch.cat([r[3] for r in results])
    for result in results:
        assert torch.equal(result[1], results[0][1]) and torch.equal(result[4], results[0][4])
        assert not result[1][~active].any() and not errors[~active].any()
    scale = max(1.0, float(errors.abs().max()))
    torch.testing.assert_close(results[0][1], inputs - errors, rtol=1e-11, atol=1e-11 * scale)
