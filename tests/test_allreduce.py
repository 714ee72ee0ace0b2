"""The allreduce keeps what it loses, spends the bytes that it promises, and gives each tensor a
scale of its own.
"""

import pytest
import torch
from helpers.allreduce_rounds import ODD_SHAPES, flatten, make, rounds
from helpers.cases import more

import onebit
from onebit.allreduce import ExactAllreduce
from onebit.compression import Identity, Sign
from onebit.layout import ALIGNMENT, Layout


@pytest.mark.report("R14")
@pytest.mark.parametrize("size", [1, 3, 8, *more(2, 4, 5, 6, 7)])
@pytest.mark.parametrize("compressor", [Sign, Identity])
def test_telescoping(size, compressor):
    """sum of outputs = sum of mean inputs + errors at the start (0) - errors at the end, in
    float64.
    """
    results = onebit.comm.run_threads(
        size, lambda c: rounds(c, ODD_SHAPES, 60, compressor=compressor)
    )
    inputs = sum(r[0] for r in results) / size
    errors = sum(r[2] for r in results) / size + torch.cat([r[3] for r in results])
    for result in results:
        torch.testing.assert_close(result[1], inputs - errors, rtol=1e-11, atol=1e-11)
    if compressor is Identity:
        assert not errors.any()


@pytest.mark.parametrize("size", [3, *more(2, 5)])
def test_telescoping_in_float32(size):
    results = onebit.comm.run_threads(size, lambda c: rounds(c, ODD_SHAPES, 200, torch.float32))
    inputs = sum(r[0].double() for r in results) / size
    errors = (
        sum(r[2].double() for r in results) / size + torch.cat([r[3] for r in results]).double()
    )
    relative = (results[0][1] - (inputs - errors)).norm() / inputs.norm()
    assert relative < 1e-5


@pytest.mark.report("R16", "R17")
@pytest.mark.parametrize("size", [1, 3, *more(2)])
def test_padding_and_masked_elements_hold_no_value_and_no_error(size):
    layout = Layout(ODD_SHAPES, size)
    active = layout.real & (torch.arange(layout.size) % 3 > 0)
    for total_in, total_out, worker_error, server_error, _ in onebit.comm.run_threads(
        size, lambda c: rounds(c, ODD_SHAPES, 5, torch.float32, active=active)
    ):
        assert not total_out[~active].any() and not worker_error[~active].any()
        assert total_in[active].all()
    assert int(layout.real.sum()) == sum(layout.numels)


@pytest.mark.parametrize("value", [0.01, 10.0, *more(0.1, 1.0)])
@pytest.mark.parametrize("size", [1, 3, *more(2)])
def test_a_lone_element_comes_out_whole(value, size):
    """The scale counts real elements only: one element padded to 64 is not shrunk by its
    padding.
    """

    def once(communicator):
        layout, compressed = make(communicator, [(1,)], torch.float32)
        return compressed.allreduce(flatten(layout, [torch.tensor([value])], torch.float32))[
            0
        ].item()

    assert onebit.comm.run_threads(size, once) == [pytest.approx(value, rel=1e-6)] * size


@pytest.mark.report("R37")
def test_small_and_large_tensors_do_not_share_a_scale():
    """A tensor of size 1e-4 beside one of size 10: the time-mean of both is right within 10 %;
    one scale for both is off by 100 x.
    """
    values = [torch.linspace(0.5, 1.5, 100) * 1e-4, torch.linspace(0.5, 1.5, 100) * 10]

    def mean_output(communicator, shapes, tensors):
        layout, compressed = make(communicator, shapes, torch.float32)
        z = flatten(layout, tensors, torch.float32)
        total = sum(compressed.allreduce(z) for _ in range(300)) / 300
        return torch.cat([v.flatten() for v in layout.views(total)])

    apart = onebit.comm.run_threads(2, lambda c: mean_output(c, [(100,), (100,)], values))[0]
    together = onebit.comm.run_threads(2, lambda c: mean_output(c, [(200,)], [torch.cat(values)]))[
        0
    ]

    def error(out, i):
        return ((out[100 * i : 100 * i + 100] - values[i]).norm() / values[i].norm()).item()

    assert error(apart, 0) < 0.1 and error(apart, 1) < 0.1
    assert error(together, 0) > 10


@pytest.mark.report("R16", "R43")
@pytest.mark.parametrize("size", [3, 7, *more(2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_at_the_wire_equal_the_promise(size, dtype):
    """(W - 1) rows sent twice: chunk / 8 bytes of signs and one scale for each piece of the
    fullest chunk, up to a multiple of 16 bytes; two calls for any number of tensors.
    """
    shapes = ODD_SHAPES * 20

    def count(communicator):
        layout, compressed = make(communicator, shapes, dtype)
        compressed.allreduce(torch.randn(layout.size, dtype=dtype))
        return layout, communicator.bytes_sent, communicator.bytes_received, communicator.calls

    for layout, sent, received, calls in onebit.comm.run_threads(size, count):
        edges = sorted(
            {*layout.starts, layout.used, layout.size, *range(0, layout.size, layout.chunk)}
        )
        pieces = max(
            sum(layout.chunk * j <= e < layout.chunk * (j + 1) for e in edges) for j in range(size)
        )
        row = -(-(layout.chunk // 8 + pieces * dtype.itemsize) // 16) * 16
        assert sent == received == 2 * (size - 1) * row
        assert calls == 2
        assert (
            layout.chunk % ALIGNMENT == 0
            and layout.size - layout.used < size * ALIGNMENT + ALIGNMENT
        )


@pytest.mark.report("R16")
def test_scales_are_root_mean_squares_of_real_elements():
    """By hand: one tensor (3, -4), one rank: norm 5 over sqrt(2) elements, error x - C[x].

    The server sees equal magnitudes and loses nothing.
    """
    layout, compressed = make(onebit.comm.Single(), [(2,)])
    out = compressed.allreduce(flatten(layout, [torch.tensor([3.0, -4.0])], torch.float64))
    scale = 5 / 2**0.5
    torch.testing.assert_close(out[:2], torch.tensor([scale, -scale], dtype=torch.float64))
    torch.testing.assert_close(
        compressed.worker_error[:2], torch.tensor([3 - scale, scale - 4], dtype=torch.float64)
    )
    assert compressed.server_error.abs().max() < 1e-15


def test_all_zero_input_is_averaged_to_zero_without_error():
    for r in onebit.comm.run_threads(
        3,
        lambda c: make(c, ODD_SHAPES)[1].allreduce(
            torch.zeros(Layout(ODD_SHAPES, 3).size, dtype=torch.float64)
        ),
    ):
        assert not r.any()


def test_total_error_is_the_mean_worker_error_plus_the_server_error():
    def total(communicator):
        layout, compressed = make(communicator, ODD_SHAPES)
        generator = torch.Generator().manual_seed(communicator.rank)
        for _ in range(5):
            compressed.allreduce(torch.randn(layout.size, dtype=torch.float64, generator=generator))
        return compressed.total_error(), compressed.worker_error, compressed.server_error

    results = onebit.comm.run_threads(3, total)
    expected = sum(r[1] for r in results) / 3 + torch.cat([r[2] for r in results])
    for result in results:
        torch.testing.assert_close(result[0], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wire_dtype", [None, torch.float16, torch.bfloat16])
def test_exact_allreduce_is_the_mean_in_the_wire_dtype(wire_dtype):
    values = [torch.linspace(-1, 1, 37) * (rank + 1) for rank in range(3)]
    sent = [v.to(wire_dtype or v.dtype).float() for v in values]
    expected = ((sent[0] + sent[1] + sent[2]) / 3).to(wire_dtype or torch.float32).float()
    for result in onebit.comm.run_threads(
        3, lambda c: ExactAllreduce(c, wire_dtype).allreduce(values[c.rank])
    ):
        assert torch.equal(result, expected)


def test_without_feedback_the_errors_stay_zero():
    """Sign loses something of every vector.

    The outputs of two equal rounds are then equal, which error feedback would make different.
    """

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
