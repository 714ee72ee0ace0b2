"""What the kernels compute, by hand and by an independent sum, in every module of kernels."""

import math

import numpy as np
import pytest
import torch
from helpers.cases import more
from helpers.kernel_steps import SHAPES, TYPES, Worker, assert_same

from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Terms
from onebit.layout import ALIGNMENT, BLOCK, Layout


@pytest.mark.parametrize("dtype", TYPES)
def test_compression_by_hand(kernels, dtype):
    """c = (1, -7) has scale sqrt(50 / 2) = 5 and error (-4, -2).

    (11, 1) on top gives c = (7, -1), scale 5; 0.5 m + (2.5, -5.5) - 3 gives 2.
    """
    partition = Layout([(2,)], 1).worker_partition()
    c, scales = (
        torch.zeros(64, dtype=dtype),
        torch.zeros(2, dtype=dtype),
    )  # the second scale is the tail's
    message = torch.tensor([0b11111101, *[255] * 7], dtype=torch.uint8)
    for g, compensated in (([0.5, -3.5], [1, -7]), ([5.5, 0.5], [7, -1])):
        payload, scales = kernels.compress(
            partition, Terms([torch.tensor(g, dtype=dtype)], [2.0]), c, scales, c
        )
        assert c[:2].tolist() == compensated and not c[2:].any()
        assert scales.tolist() == [5, 0]
        own = torch.cat([message, scales[:1].view(torch.uint8)])
        assert torch.equal(payload, torch.nn.functional.pad(own, (0, -len(own) % 16))[None])
    terms = Terms([torch.tensor([-2.5, -5.5], dtype=dtype)], [1.0], payload, [0.5])
    kernels.compress(partition, terms, c, scales, c)
    assert c[:2].tolist() == [2.5 - 2.5 + 2, -2.5 - 5.5 + 4]


@pytest.mark.parametrize("dtype", TYPES)
def test_average_by_hand(kernels, dtype):
    """Scales 4 and 2 of two ranks: z = (2 + 1, -2 + 1, -2 - 1), and 61 times 0 in the padding."""
    layout = Layout([(3,)], 2)
    partition = layout.server_partition(0, layout.worker_partition())
    rows = [
        torch.cat(
            [
                torch.tensor([first, *[0] * 7], dtype=torch.uint8),
                torch.tensor([scale], dtype=dtype).view(torch.uint8),
            ]
        )
        for first, scale in ((0b001, 4), (0b011, 2))
    ]
    c = torch.full((64,), 5.0, dtype=dtype)
    payload, scales = kernels.average(
        partition, torch.stack(rows), c, torch.tensor([5.0], dtype=dtype), c
    )
    assert c[:3].tolist() == [3, -1, -3] and not c[3:].any()
    assert scales.tolist() == torch.tensor([19 / 3], dtype=torch.float64).sqrt().to(dtype).tolist()
    assert payload[0, :8].tolist() == [0b11111001, *[255] * 7]


@pytest.mark.parametrize("dtype", TYPES)
def test_update_by_hand(kernels, dtype):
    """x = 1, decay 0.5, step 2, m = (5, -5, 5): 0.5 - 10 / (sqrt(4) + 3), 0.5 + 10 / (sqrt(49)
    + 3), and 0.5 where masked.
    """
    layout = Layout([(3,)], 1)
    partition = layout.worker_partition(torch.arange(64) < 2)
    momentum = torch.cat(
        [
            torch.tensor([0b101, *[0] * 7], dtype=torch.uint8),
            torch.tensor([5.0], dtype=dtype).view(torch.uint8),
        ]
    )[None]
    x, variance = torch.ones(3, dtype=dtype), torch.zeros(64, dtype=dtype)
    variance[:2] = torch.tensor([4.0, 49.0])
    count = kernels.update(partition, [x], variance, momentum, [0.5], [2.0], [3.0], [math.inf])
    assert x.tolist() == [-1.5, 1.5, 0.5] and int(count) == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_a_limit_bounds_each_move_by_hand(kernels, dtype):
    """The moves of `test_update_by_hand`, 2 and -1 within +-1.5: one of them is beyond it."""
    partition = Layout([(3,)], 1).worker_partition(torch.arange(64) < 2)
    momentum = torch.cat(
        [
            torch.tensor([0b101, *[0] * 7], dtype=torch.uint8),
            torch.tensor([5.0], dtype=dtype).view(torch.uint8),
        ]
    )[None]
    x, variance = torch.ones(3, dtype=dtype), torch.zeros(64, dtype=dtype)
    variance[:2] = torch.tensor([4.0, 49.0])
    count = kernels.update(partition, [x], variance, momentum, [0.5], [2.0], [3.0], [1.5])
    assert x.tolist() == [-1.0, 1.5, 0.5] and int(count) == 1


def test_no_step_is_no_move(kernels):
    """A step or a scale of 0 only decays, even where v and eps are 0."""
    worker = Worker([(70,), (3,)])
    worker.variance.zero_()
    payload = kernels.compress(
        worker.partition,
        Terms([worker.gradients[0][0], None], [1.0] * 2),
        *worker.worker,
        worker.worker[0],
    )[0]
    before = [x.clone() for x in worker.parameters]
    kernels.update(
        worker.partition,
        worker.parameters,
        worker.variance,
        payload,
        [0.5] * 2,
        [0.0, 1.0],
        [0.0] * 2,
        [math.inf] * 2,
    )
    assert_same(worker.parameters, [x * 0.5 for x in before])


def test_measure_by_hand(kernels):
    """(3, -4, 12) with the last two masked: 169 and two late elements; NaN is late as well."""
    partition = Layout([(3,), (2,)], 1).worker_partition(torch.arange(128) < 1)
    assert kernels.measure(partition, [torch.tensor([3.0, -4.0, 12.0]), None]).tolist() == [169, 2]
    assert kernels.measure(partition, [None, torch.tensor([0, float("nan")])])[1] == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_adam_by_hand(kernels, dtype):
    """m = 0.25 * -4 + 0.75 * 4 = 2, v = 0.75 * 20 / 3 + 0.25 * 16 = 9, x = 0.5 * 1 - 3 * 2 / (2
    * 3 + 6) = 0; without a parameter m and v alone.
    """
    partition = Layout([(1,), (1,)], 1).worker_partition()
    g, m, v = (torch.zeros(128, dtype=dtype) for _ in range(3))
    g[::64], m[::64], v[::64] = 4, -4, torch.tensor(20 / 3, dtype=dtype)
    x = torch.ones(1, dtype=dtype)
    kernels.adam(
        partition,
        [x, None],
        g,
        m,
        v,
        *([number] * 2 for number in (0.25, 0.75, 0.5, 3.0, 6.0, 2.0)),
    )
    assert (m[::64].tolist(), x.tolist()) == ([2, 2], [0])
    assert (
        torch.allclose(v[::64], torch.full((2,), 9, dtype=dtype))
        and int(torch.count_nonzero(torch.stack([m, v]))) == 4
    )


@pytest.mark.parametrize("n", [3 * BLOCK + 130, *more(1, 65, BLOCK - 1)])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_are_added_in_the_defined_order(kernels, n, dtype):
    """measure and the scales equal sums of Python's own floats, element by element, of values
    so far apart that the order shows.
    """
    torch.manual_seed(n)
    numels = (n, n // 2 + 1, n)
    tensors = [
        (
            torch.randn(k, dtype=torch.float64) * 10 ** (4 * torch.rand(k, dtype=torch.float64) - 2)
        ).to(dtype)
        for k in numels
    ]
    partition = Layout([(k,) for k in numels], 1).worker_partition()
    sums = [square_sum(x.tolist()) for x in tensors]
    assert kernels.measure(partition, tensors).tolist() == [sums[0] + sums[1] + sums[2], 0]
    c, scales = partition.zeros(dtype), torch.zeros(len(partition.lengths), dtype=dtype)
    scales = kernels.compress(partition, Terms(tensors, [1.0] * 3), c, scales, c)[1]
    assert torch.equal(
        scales,
        torch.tensor(
            [math.sqrt(total / k) for total, k in zip(sums, numels)] + [0], dtype=torch.float64
        ).to(dtype),
    )


def square_sum(values):
    total = 0.0
    for start in range(0, len(values), BLOCK):
        lanes = [0.0] * ALIGNMENT
        for i, value in enumerate(values[start : start + BLOCK]):
            lanes[i % ALIGNMENT] += value * value
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [left + right for left, right in zip(lanes[:half], lanes[half:])]
        total += lanes[0]
    return total


@pytest.mark.parametrize("dtype", TYPES)
def test_update_rounds_each_operation_once(kernels, dtype):
    """x d - (s m) / (sqrt(v) + eps) equals NumPy's, whose square root and division are those of
    IEEE.
    """
    n, (decay, step, eps) = 100_003, (0.999, 0.01, 1e-8)
    worker = Worker([(n,)], dtype=dtype)
    x, v = worker.parameters[0].numpy().copy(), worker.variance[:n].numpy()
    payload, scales = kernels.compress(
        worker.partition, Terms(worker.gradients[0], [1.0]), *worker.worker, worker.worker[0]
    )
    T = x.dtype.type
    signs = np.where(worker.gradients[0][0].numpy() >= 0, T(1), T(-1))
    expected = x * T(decay) - signs * (scales[0].numpy() * T(step)) / (np.sqrt(v) + T(eps))
    kernels.update(
        worker.partition,
        worker.parameters,
        worker.variance,
        payload,
        [decay],
        [step],
        [eps],
        [math.inf],
    )
    assert np.array_equal(worker.parameters[0].numpy(), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_message_is_its_little_endian_bits_and_the_scales_of_its_pieces(kernels, ranks):
    """Row j = np.packbits(c >= 0) of chunk j, then the scale of each tensor that has a piece
    there.
    """
    worker = Worker(SHAPES["around a block"], ranks)
    payload = worker.step(kernels, worker.gradients[0])[1].numpy()
    vector, scales = worker.worker
    for row, chunk, groups in zip(payload, vector.view(ranks, -1), worker.partition.piece_groups):
        bits = np.packbits(chunk.numpy() >= 0, bitorder="little")
        own = np.concatenate([bits, scales[groups].numpy().view(np.uint8)])
        assert np.array_equal(row, np.pad(own, (0, len(row) - len(own))))
        assert len(row) % 16 == 0 and len(row) - len(own) < 16


@pytest.mark.parametrize("mask", ["all", "random"])
def test_the_lazy_error_is_the_stored_one(kernels, mask):
    """e = c - scale * sign(c), kept and handed over with scale 0, gives the same five rounds,
    bit for bit.
    """
    shapes = SHAPES["around a block"]
    lazy, stored = Worker(shapes, 2, mask=mask), Worker(shapes, 2, mask=mask)
    for round_ in range(5):
        gradients = [g * (round_ + 1) for g in lazy.gradients[round_ % 3]]
        results = [worker.step(kernels, gradients) for worker in (lazy, stored)]
        assert_same(*results)
        vector, scales = stored.worker
        error = (
            vector
            - torch.where(vector >= 0, 1, -1)
            * torch_ops.per_block(scales, stored.partition.lengths).expand(-1, ALIGNMENT).flatten()
        )
        stored.worker = error, torch.zeros_like(scales)
