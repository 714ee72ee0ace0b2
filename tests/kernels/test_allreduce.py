"""The compressed allreduce keeps what it loses, spends the bytes it promises, and never lets one tensor's size spoil another's."""

import numpy as np
import pytest
import torch

import onebit
from onebit.allreduce import CompressedAllreduce, ExactAllreduce
from onebit.compression import Identity, Sign
from onebit.kernels import torch_ops
from onebit.layout import ALIGNMENT, Layout

ODD_SHAPES = [(1,), (2,), (7,), (8,), (9, 7), (64,), (65,), (0,), (), (1000,)]


def make(communicator, shapes, dtype=torch.float64, compressor=Sign, active=None):
    layout = Layout(shapes, communicator.size)
    return layout, CompressedAllreduce(communicator, layout, dtype, compressor, active)


def flatten(layout, tensors, dtype):
    flat = torch.zeros(layout.size, dtype=dtype)
    for view, tensor in zip(layout.views(flat), tensors):
        view.copy_(tensor)
    return flat


def rounds(communicator, shapes, count, dtype=torch.float64, compressor=Sign, active=None):
    """(sum of inputs, sum of outputs, worker error, server error) of this rank after `count` random rounds, and the last output."""
    layout, compressed = make(communicator, shapes, dtype, compressor, active)
    generator = torch.Generator().manual_seed(communicator.rank)
    total_in, total_out = (torch.zeros(layout.size, dtype=dtype) for _ in range(2))
    for _ in range(count):
        z = flatten(
            layout,
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes],
            dtype,
        )
        output = compressed.allreduce(z)
        total_in += torch.where(compressed.partition.active, z, 0)
        total_out += output
    return total_in, total_out, compressed.worker_error, compressed.server_error, output


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("compressor", [Sign, Identity])
def test_telescoping(size, compressor):
    """sum of outputs = sum of mean inputs + errors at the start (0) - errors at the end, in float64."""
    results = onebit.comm.run_threads(
        size, lambda c: rounds(c, ODD_SHAPES, 60, compressor=compressor)
    )
    inputs = sum(r[0] for r in results) / size
    errors = sum(r[2] for r in results) / size + torch.cat([r[3] for r in results])
    for result in results:
        torch.testing.assert_close(result[1], inputs - errors, rtol=1e-11, atol=1e-11)
    if compressor is Identity:
        assert not errors.any()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_telescoping_in_float32(size):
    results = onebit.comm.run_threads(size, lambda c: rounds(c, ODD_SHAPES, 200, torch.float32))
    inputs = sum(r[0].double() for r in results) / size
    errors = (
        sum(r[2].double() for r in results) / size + torch.cat([r[3] for r in results]).double()
    )
    relative = (results[0][1] - (inputs - errors)).norm() / inputs.norm()
    assert relative < 1e-5


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_and_masked_elements_hold_no_value_and_no_error(size):
    layout = Layout(ODD_SHAPES, size)
    active = layout.real & (torch.arange(layout.size) % 3 > 0)
    for total_in, total_out, worker_error, server_error, _ in onebit.comm.run_threads(
        size, lambda c: rounds(c, ODD_SHAPES, 5, torch.float32, active=active)
    ):
        assert not total_out[~active].any() and not worker_error[~active].any()
        assert total_in[active].all()
    assert int(layout.real.sum()) == sum(layout.numels)


@pytest.mark.parametrize("value", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_lone_element_comes_out_whole(value, size):
    """The scale counts real elements only: one element padded to 64 is not shrunk by its padding."""

    def once(communicator):
        layout, compressed = make(communicator, [(1,)], torch.float32)
        return compressed.allreduce(flatten(layout, [torch.tensor([value])], torch.float32))[
            0
        ].item()

    assert onebit.comm.run_threads(size, once) == [pytest.approx(value, rel=1e-6)] * size


def test_small_and_large_tensors_do_not_share_a_scale():
    """A tensor of size 1e-4 beside one of size 10: the time-mean of both is right within 10 %; one scale for both is off by 100 x."""
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
    error = lambda out, i: (
        (out[100 * i : 100 * i + 100] - values[i]).norm() / values[i].norm()
    ).item()  # noqa: E731
    assert error(apart, 0) < 0.1 and error(apart, 1) < 0.1
    assert error(together, 0) > 10


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_at_the_wire_equal_the_promise(size, dtype):
    """(W - 1) rows sent twice: chunk / 8 bytes of signs and one scale for each piece of the fullest chunk; two calls for any number of tensors."""
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
        assert sent == received == 2 * (size - 1) * (layout.chunk // 8 + pieces * dtype.itemsize)
        assert calls == 2
        assert (
            layout.chunk % ALIGNMENT == 0
            and layout.size - layout.used < size * ALIGNMENT + ALIGNMENT
        )


def test_scales_are_root_mean_squares_of_real_elements():
    """By hand: one tensor (3, -4), one rank: norm 5 over sqrt(2) elements, error x - C[x]; the server sees equal magnitudes and loses nothing."""
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


@pytest.mark.parametrize("n", [0, 8, 64, 1000, 4096])
def test_packed_signs_are_numpys_little_endian_bits(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[::5] = 0.0
    x[1::5] = -0.0
    bits = torch_ops.pack_signs(x)
    np.testing.assert_array_equal(bits.numpy(), np.packbits(x.numpy() >= 0, bitorder="little"))
    if n % ALIGNMENT == 0:
        scaled = torch_ops.scaled_signs(bits, torch.tensor([2.5]), torch.tensor([n]))
        assert torch.equal(scaled, torch.where(x >= 0, 2.5, -2.5))


def test_sums_do_not_depend_on_the_number_of_threads():
    layout = Layout([(ALIGNMENT * 1234,), (0,), (ALIGNMENT * 3766 - 5,)], 3)
    partition = layout.worker_partition()
    x = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums.append(
                torch_ops.group_sums(partition, torch_ops.block_sums(partition, x, square=False))
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*sums) and sums[0][1] == 0
    parts = x.double().split(layout.lengths.tolist())
    torch.testing.assert_close(
        sums[0], torch.stack([part.sum() for part in parts]), rtol=1e-12, atol=1e-10
    )
    squares = torch_ops.group_sums(partition, torch_ops.block_sums(partition, x))
    torch.testing.assert_close(
        squares, torch.stack([part.square().sum() for part in parts]), rtol=1e-12, atol=0
    )
