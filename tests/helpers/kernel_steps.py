"""One rank's state and its steps with the kernels of any module, on shapes that meet every edge of
a word and a block.
"""

import importlib
import math

import pytest
import torch

from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Path, Terms
from onebit.layout import BLOCK, Layout

TYPES = (torch.float32, torch.float64)
SHAPES = {
    "one element": [(1,)],
    "a scalar and nothing": [(), (0,)],
    "around a word": [(63,), (64,), (65,)],
    "around a block": [(BLOCK - 1,), (BLOCK,), (BLOCK + 1,)],
    "odd and larger": [(100003,), (3, 5, 7)],
    "more blocks than lanes": [(3,), (65 * BLOCK + 5,)],
    "many": [(1 + 37 * i % 101,) for i in range(60)] + [(70, 70), (0, 3)],
}
MASKS = {
    "all": lambda real: None,
    "random": lambda real: real & (torch.rand(len(real)) < 0.7),
    "whole blocks": lambda real: real & (torch.arange(len(real)) // BLOCK % 2 == 1),
    "none": lambda real: torch.zeros_like(real),
}


def module(name):
    if name == "cpu":
        pytest.importorskip("numba", exc_type=ImportError)
    return importlib.import_module(f"onebit.kernels.{name}")


class Worker:
    """The state of one rank out of several that compress the same gradients, and steps of it
    with some module's kernels.
    """

    def __init__(self, shapes, ranks=1, dtype=torch.float32, mask="all", rank=0):
        torch.manual_seed(len(shapes) + ranks)
        self.layout = Layout(shapes, ranks)
        self.dtype, self.numbers = dtype, [0.1 + 0.01 * i for i in range(len(shapes))]
        self.partition = self.layout.worker_partition(MASKS[mask](self.layout.real))
        self.chunk = self.layout.server_partition(rank, self.partition)
        self.rank = rank
        self.variance = torch.rand(self.layout.size, dtype=dtype).square_() * self.layout.real
        self.parameters = [torch.randn(shape, dtype=dtype) for shape in shapes]
        self.gradients = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(3)]
        self.worker = (
            torch.zeros(self.layout.size, dtype=dtype),
            torch.zeros(len(self.partition.lengths), dtype=dtype),
        )
        self.server = (
            torch.zeros(self.layout.chunk, dtype=dtype),
            torch.zeros(len(self.chunk.lengths), dtype=dtype),
        )
        self.momentum, self.exp_avg = None, torch.zeros(self.layout.size, dtype=dtype)

    def step(self, kernels, gradients):
        """One step of all four kernels. Returns everything that they wrote."""
        measured = kernels.measure(self.partition, gradients)
        terms = Terms(gradients, self.numbers, self.momentum, [0.9 - x for x in self.numbers])
        (vector, scales), (server_vector, server_scales) = self.worker, self.server
        payload, scales = kernels.compress(self.partition, terms, vector, scales, vector)
        received = torch.stack(
            [payload[self.rank]] * self.layout.ranks
        )  # ranks whose scales differ
        bits = self.partition.row_elements // 8
        factors = torch.arange(1, self.layout.ranks + 1, dtype=self.dtype)[:, None]
        received[:, bits:] = (received[:, bits:].clone().view(self.dtype) * factors).view(
            torch.uint8
        )
        answer, server_scales = kernels.average(
            self.chunk, received, server_vector, server_scales, server_vector
        )
        decays, epsilons = [1 - 1e-3 * x for x in self.numbers], [1e-8] * len(self.numbers)
        limits = [(0.5, math.inf, 0.05)[i % 3] for i in range(len(self.numbers))]
        numbers = decays, self.numbers, epsilons, limits
        bounded = kernels.update(self.partition, self.parameters, self.variance, payload, *numbers)
        self.worker, self.server, self.momentum = (
            (vector, scales),
            (server_vector, server_scales),
            payload,
        )
        written = [
            measured,
            payload,
            scales,
            vector,
            answer,
            server_scales,
            server_vector,
            bounded,
            *self.parameters,
        ]
        return [tensor.clone() for tensor in written]

    def warmup_step(self, kernels, gradients):
        """One step of uncompressed Adam. Returns everything that it wrote."""
        flat = self.partition.zeros(self.dtype)
        for view, gradient in zip(self.layout.views(flat), gradients):
            view.copy_(gradient)
        decays, steps, roots = (
            [1 - x for x in self.numbers],
            [0.01 * x for x in self.numbers],
            [1 + x for x in self.numbers],
        )
        betas = [1 - x / 10 for x in self.numbers]
        kernels.adam(
            self.partition,
            self.parameters,
            flat,
            self.exp_avg,
            self.variance,
            decays,
            betas,
            decays,
            steps,
            self.numbers,
            roots,
        )
        written = [self.exp_avg, self.variance, *self.parameters]
        return [tensor.clone() for tensor in written]

    def steps(self, kernels):
        """Three steps; with the second the error counts, with the third it is that of a
        step with momentum. Then one without compression.
        """
        written = [
            tensor for gradients in self.gradients for tensor in self.step(kernels, gradients)
        ]
        return written + self.warmup_step(kernels, self.gradients[0])


def zero_one_steps(kernels, worker):
    """Everything that two local steps and a sync write, twice, then a sync at once.

    The last tensor is left alone.
    """
    partition, numbers = worker.partition, worker.numbers
    zeros = partition.zeros(worker.dtype)
    worker.variance[::7] = 0
    state = worker.exp_avg, zeros.clone(), worker.variance
    anchor, betas = zeros.clone(), [0.9 - x for x in numbers]
    decays, epsilons = [1 - 1e-3 * x for x in numbers], [1e-8] * len(numbers)
    limits = [(0.5, math.inf, 0.05)[i % 3] for i in range(len(numbers))]
    moves = decays, numbers, epsilons, limits
    parameters = [*worker.parameters[:-1], None]
    totals, written = [3 * x * (i % 4 > 0) for i, x in enumerate(numbers)], []
    for local_steps in (2, 2, 0):
        for step in range(local_steps):
            gradients = [*worker.gradients[step][:-1], None] if step else worker.gradients[step]
            first = anchor if step == 0 else None
            gradients = [with_infinity(g) for g in gradients] if step == 0 else gradients
            rates = 0.5 + step, step == 0, betas, numbers, *moves
            bounded = kernels.zero_one_local(
                partition, parameters, gradients, *state, first, *rates
            )
            written += [bounded, *state, anchor, *worker.parameters]
        u = state[1] if local_steps else None
        path = Path(state[0], u, betas, [1 - x for x in betas], numbers, totals)
        terms = Terms(worker.gradients[2], [0.5] * len(numbers), path=path)
        vector, scales = worker.worker
        payload, scales = kernels.compress(partition, terms, vector, scales, vector)
        worker.worker = vector, scales
        start = anchor if local_steps else None
        vectors = worker.variance, payload, state[0], start
        bounded = kernels.zero_one_sync(partition, parameters, *vectors, *moves)
        written += copies(payload, scales, vector, bounded, state[0], *worker.parameters)
    return written


def with_infinity(g):
    g = g.clone()
    g.view(-1)[::5], g.view(-1)[1::5] = math.inf, math.nan
    return g


def copies(*tensors):
    return [x.clone() for x in tensors]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for i, (x, y) in enumerate(zip(found, expected)):
        assert x.dtype == y.dtype and torch.equal(x, y), (
            f"result {i}: {int((x != y).sum())} of {x.numel()} differ"
        )


def assert_bounded_by_hand(kernels, dtype):
    """Signs + - + - and scale 2 under v = 1, 4, 16, 0: the limit 0.75 holds three of four moves.

    NaN stays, infinity is no limit, and what is masked does not count.
    """
    layout = Layout([(4,), (2,), (2,)], 1)
    active = layout.real.clone()
    active[layout.starts[2] + 1] = False
    partition = layout.worker_partition(active)
    signs = torch.where(torch.arange(layout.size) % 2 == 0, 1.0, -1.0)
    scales = torch.tensor([2.0, math.nan, 2.0, 0.0], dtype=dtype)
    payload = torch_ops.join_payload(partition, torch_ops.pack_signs(signs), scales)
    variance = torch.zeros(layout.size, dtype=dtype)
    variance[:4] = torch.tensor([1.0, 4.0, 16.0, 0.0])
    x = [torch.zeros(shape, dtype=dtype) for shape in layout.shapes]
    numbers = [1.0] * 3, [1.0] * 3, [0.0] * 3, [0.75, 0.75, math.inf]
    assert kernels.update(partition, x, variance, payload, *numbers).item() == 3
    assert x[0].tolist() == [-0.75, 0.75, -0.5, 0.75]
    assert x[1].isnan().all() and x[2].tolist() == [-math.inf, 0]
