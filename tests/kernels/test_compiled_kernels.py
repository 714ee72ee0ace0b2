"""The compiled kernels give the bits of their definition, and touch nothing beside what they are
given.
"""

from itertools import product

import pytest
import torch
from helpers.cases import more, more_of
from helpers.kernel_steps import (
    SHAPES,
    TYPES,
    Worker,
    assert_bounded_by_hand,
    assert_same,
    zero_one_steps,
)

from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Terms
from onebit.layout import BLOCK


@pytest.mark.parametrize(
    "dtype, mask",
    [
        (torch.float32, "random"),
        (torch.float64, "random"),
        *more_of(
            (torch.float32, "all"),
            (torch.float64, "all"),
            *product(TYPES, ("whole blocks", "none")),
        ),
    ],
)
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_kernels_give_the_same_bits(compiled, name, dtype, mask):
    """Everything that three steps write, at W = 1 to 4."""
    for ranks in (1, 2, 3, 4):
        assert_same_steps(compiled, SHAPES[name], ranks, dtype, mask)


@pytest.mark.parametrize("mask", ["whole blocks", "none"])
def test_compiled_kernels_give_the_same_bits_where_whole_blocks_are_masked(compiled, mask):
    for ranks in (1, 3):
        assert_same_steps(compiled, SHAPES["odd and larger"], ranks, torch.float32, mask)


def assert_same_steps(compiled, shapes, ranks, dtype, mask):
    found, expected = (
        Worker(shapes, ranks, dtype, mask, rank=ranks - 1).steps(kernels)
        for kernels in (compiled, torch_ops)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("of", ["variance", "root"])
@pytest.mark.parametrize("dtype, mask", [(torch.float32, "random"), (torch.float64, "all")])
@pytest.mark.parametrize("name", ["one element", "a scalar and nothing", "around a block", "many"])
def test_1_bit_lambs_pass_gives_the_same_bits(compiled, name, dtype, mask, of):
    """The fresh variance and each tensor's largest ratio, of two momenta, with zeros in both
    variances and a scale that is NaN.
    """
    worker = Worker(SHAPES[name], 3, dtype, mask)
    before, after = (
        torch_ops.compress(worker.partition, Terms(g), *worker.worker, worker.worker[0].clone())[0]
        for g in worker.gradients[:2]
    )
    worker.variance[::7] = 0
    fresh = worker.variance.flip(0) * worker.layout.real
    fresh[3::11] = 0
    betas = worker.numbers, [0.9 - x for x in worker.numbers]
    for payload in (after, with_nan(worker, after, dtype)):
        results = []
        for kernels in (compiled, torch_ops):
            own = fresh.clone()
            largest = kernels.lamb_follow(
                worker.partition, before, payload, worker.variance, own, *betas, betas[0], of
            )
            results.append((own, largest))
        for found, expected in zip(*results):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, mask", [(torch.float32, "random"), (torch.float64, "all")])
@pytest.mark.parametrize("name", ["one element", "a scalar and nothing", "around a block", "many"])
def test_0_1_adams_passes_give_the_same_bits(compiled, name, dtype, mask):
    """Two local steps and a sync, twice, then a sync at once; the last tensor is left alone."""
    found, expected = (
        zero_one_steps(kernels, Worker(SHAPES[name], 3, dtype, mask))
        for kernels in (compiled, torch_ops)
    )
    assert_same(found, expected)


def with_nan(worker, payload, dtype):
    """The payload with NaN as the first scale of its first row."""
    payload, bits = payload.clone(), worker.partition.row_elements // 8
    nan = torch.tensor([float("nan")], dtype=dtype).view(torch.uint8)
    payload[0, bits : bits + dtype.itemsize] = nan
    return payload


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_may_have_any_type_and_strides_or_be_none(compiled, dtype):
    """Gradients and parameters that are None, half, transposed, expanded, or start in the
    middle of a storage, mixed.
    """
    shapes = [(5, 3), (7,), (130,), (9, 11), (BLOCK + 3,), (6, 2), (4,), (8, 3, 5, 5)]

    def forms(tensors):
        half, brain, double, transposed, offset, single, _, channels = (x.clone() for x in tensors)
        padded = torch.cat([torch.zeros(1, dtype=dtype), offset])
        return [
            half.half(),
            brain.bfloat16(),
            double.double(),
            transposed.t().contiguous().t(),
            padded[1:],
            single.float(),
            None,
            channels.to(memory_format=torch.channels_last),
        ]

    results = []
    for kernels in (torch_ops, compiled):
        worker = Worker(shapes, 2, dtype)
        worker.parameters = forms(worker.parameters)
        written = []
        for gradients in worker.gradients:
            gradients = forms(gradients)
            gradients[1] = torch.tensor(0.5).expand(7)
            parameters, worker.parameters = (
                worker.parameters,
                [x if x is not None else torch.zeros(4) for x in worker.parameters],
            )
            written += worker.step(kernels, gradients)
            worker.parameters = parameters
        results.append(written)
    assert_same(*results)


def test_nothing_beside_the_parameters_is_written_and_one_that_is_none_is_left_alone(kernels):
    """Parameters with guards before and after them in one storage: the guards stay."""
    worker = Worker([(65,), (BLOCK + 1,), (64,)])
    storage = torch.full((5000,), 7.0)
    places = [slice(1, 66), slice(67, 68 + BLOCK), slice(4801, 4865)]
    worker.parameters = [storage[place] for place in places]
    worker.step(kernels, worker.gradients[0])
    guards = torch.ones(5000, dtype=torch.bool)
    for place in places:
        guards[place] = False
        assert (storage[place] != 7).all()
    assert (storage[guards] == 7).all()
    before = storage.clone()
    kernels.update(
        worker.partition,
        [None] * 3,
        worker.variance,
        worker.momentum,
        [0.5] * 3,
        [1.0] * 3,
        [1.0] * 3,
        [1.0] * 3,
    )
    assert torch.equal(storage, before)


def test_padding_is_never_read(kernels):
    """NaN right behind the end of every gradient, and in the padding of the variance, changes
    nothing.
    """
    shapes = [(65,), (BLOCK + 1,), (63,)]
    results = []
    for beside in (0.0, float("nan")):
        worker = Worker(shapes, 2)
        worker.variance[~worker.layout.real] = beside
        worker.gradients = [
            [torch.cat([g, torch.full((BLOCK,), beside)])[: len(g)] for g in gradients]
            for gradients in worker.gradients
        ]
        results.append(
            [tensor for gradients in worker.gradients for tensor in worker.step(kernels, gradients)]
        )
    assert_same(*results)


def test_vectors_need_not_be_aligned(kernels):
    """The same steps with every vector one element off."""
    plain, shifted = Worker(SHAPES["around a block"], 2), Worker(SHAPES["around a block"], 2)
    shifted.worker, shifted.server = (
        (shift(vector), shift(scales)) for vector, scales in (shifted.worker, shifted.server)
    )
    shifted.variance = shift(shifted.variance)
    assert_same(shifted.steps(kernels), plain.steps(kernels))


def shift(vector):
    buffer = torch.empty(len(vector) + 1, dtype=vector.dtype)[1:]
    return buffer.copy_(vector)


@pytest.mark.parametrize("mask", ["all", "random", *more("whole blocks", "none")])
def test_out_of_place_equals_in_place_and_leaves_the_old_vector(kernels, mask):
    """compress and average into another buffer: same results, `compensated` untouched."""
    worker = Worker(SHAPES["around a block"], 2, mask=mask)
    worker.step(kernels, worker.gradients[0])
    received = torch.stack([worker.momentum[0]] * 2)
    calls = (
        (
            kernels.compress,
            worker.partition,
            Terms(worker.gradients[1], worker.numbers),
            worker.worker,
        ),
        (kernels.average, worker.chunk, received, worker.server),
    )
    for function, partition, what, (vector, scales) in calls:
        before, out = vector.clone(), torch.empty_like(vector)
        apart = function(partition, what, vector, scales, out)
        assert torch.equal(vector, before)
        together = function(partition, what, vector, scales, vector)
        assert_same([*apart, out], [*together, vector])


def test_a_number_that_is_not_finite_stays_visible(kernels):
    """NaN or infinity in one tensor's gradient: its scale is not finite, the other tensor's is."""
    for value in (float("nan"), float("inf")):
        worker = Worker([(100,), (100,)])
        worker.gradients[0][0][70] = value
        measured, _, scales, *_ = worker.step(kernels, worker.gradients[0])
        assert not measured[0].isfinite() and scales.isfinite().tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_move_beyond_the_limit_is_brought_to_it_and_counted(kernels, dtype):
    assert_bounded_by_hand(kernels, dtype)


def test_autograd_notices_an_update(kernels):
    """backward through a graph that holds a parameter's old value raises, as after any change
    in place.
    """
    worker = Worker([(5,)])
    x = worker.parameters[0].requires_grad_()
    loss = (x * x).sum()
    with torch.no_grad():
        worker.step(kernels, worker.gradients[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
