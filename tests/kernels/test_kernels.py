"""Laws of the kernels: what `torch_ops` defines, by hand and by an independent sum, and that the compiled ones give the same bits."""

import importlib
import math
import multiprocessing
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from onebit.kernels import torch_ops
from onebit.kernels.torch_ops import Terms
from onebit.layout import ALIGNMENT, BLOCK, Column, Layout

TYPES = (torch.float32, torch.float64)
SHAPES = {
    "one element": [(1,)],
    "a scalar and nothing": [(), (0,)],
    "around a word": [(63,), (64,), (65,)],
    "around a block": [(BLOCK - 1,), (BLOCK,), (BLOCK + 1,)],
    "odd and larger": [(100003,), (3, 5, 7)],
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


@pytest.fixture(params=["torch_ops", "cpu"])
def kernels(request):
    """Each module of kernels that runs here."""
    return module(request.param)


@pytest.fixture(params=["cpu"])
def compiled(request):
    """Those that are compared with `torch_ops`."""
    return module(request.param)


@pytest.fixture
def cpu():
    return module("cpu")


@pytest.fixture
def loops(cpu):
    return cpu.cpu_loops


@pytest.fixture(autouse=True)
def one_thread():
    """Most vectors here are short; a test that wants more threads says so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Worker:
    """The state of one rank out of several that compress the same gradients, and steps of it with some module's kernels."""

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
        kernels.update(
            self.partition, self.parameters, self.variance, payload, decays, self.numbers, epsilons
        )
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
        """Three steps; with the second the error counts, with the third it is that of a step with momentum. Then one without compression."""
        written = [
            tensor for gradients in self.gradients for tensor in self.step(kernels, gradients)
        ]
        return written + self.warmup_step(kernels, self.gradients[0])


def assert_same(found, expected):
    assert len(found) == len(expected)
    for i, (x, y) in enumerate(zip(found, expected)):
        assert x.dtype == y.dtype and torch.equal(x, y), (
            f"result {i}: {int((x != y).sum())} of {x.numel()} differ"
        )


# ---- the definition


@pytest.mark.parametrize("dtype", TYPES)
def test_compression_by_hand(kernels, dtype):
    """c = (1, -7) has scale sqrt(50 / 2) = 5 and error (-4, -2); (11, 1) on top gives c = (7, -1), scale 5; 0.5 m + (2.5, -5.5) - 3 gives 2."""
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
        assert torch.equal(payload, torch.cat([message, scales[:1].view(torch.uint8)])[None])
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
    """x = 1, decay 0.5, step 2, m = (5, -5, 5): 0.5 - 10 / (sqrt(4) + 3), 0.5 + 10 / (sqrt(49) + 3), and 0.5 where masked."""
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
    kernels.update(partition, [x], variance, momentum, [0.5], [2.0], [3.0])
    assert x.tolist() == [-1.5, 1.5, 0.5]


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
    )
    assert_same(worker.parameters, [x * 0.5 for x in before])


def test_measure_by_hand(kernels):
    """(3, -4, 12) with the last two masked: 169 and two late elements; NaN is late as well."""
    partition = Layout([(3,), (2,)], 1).worker_partition(torch.arange(128) < 1)
    assert kernels.measure(partition, [torch.tensor([3.0, -4.0, 12.0]), None]).tolist() == [169, 2]
    assert kernels.measure(partition, [None, torch.tensor([0, float("nan")])])[1] == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_adam_by_hand(kernels, dtype):
    """m = 0.25 * -4 + 0.75 * 4 = 2, v = 0.75 * 20 / 3 + 0.25 * 16 = 9, x = 0.5 * 1 - 3 * 2 / (2 * 3 + 6) = 0; without a parameter m and v alone."""
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


@pytest.mark.parametrize("n", [1, 65, BLOCK - 1, 3 * BLOCK + 130])
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_are_added_in_the_defined_order(kernels, n, dtype):
    """measure and the scales equal sums of Python's own floats, element by element, of values so far apart that the order shows."""
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
    """x d - (s m) / (sqrt(v) + eps) equals NumPy's, whose square root and division are those of IEEE."""
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
        worker.partition, worker.parameters, worker.variance, payload, [decay], [step], [eps]
    )
    assert np.array_equal(worker.parameters[0].numpy(), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_message_is_its_little_endian_bits_and_the_scales_of_its_pieces(kernels, ranks):
    """Row j = np.packbits(c >= 0) of chunk j, then the scale of each tensor that has a piece there."""
    worker = Worker(SHAPES["around a block"], ranks)
    payload = worker.step(kernels, worker.gradients[0])[1].numpy()
    vector, scales = worker.worker
    for row, chunk, groups in zip(payload, vector.view(ranks, -1), worker.partition.piece_groups):
        bits = np.packbits(chunk.numpy() >= 0, bitorder="little")
        assert np.array_equal(row, np.concatenate([bits, scales[groups].numpy().view(np.uint8)]))


@pytest.mark.parametrize("mask", ["all", "random"])
def test_the_lazy_error_is_the_stored_one(kernels, mask):
    """e = c - scale * sign(c), kept and handed over with scale 0, gives the same five rounds, bit for bit."""
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


# ---- the same bits


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_kernels_give_the_same_bits(compiled, name, dtype, mask):
    """Everything that three steps write, at W = 1 to 4."""
    for ranks in (1, 2, 3, 4):
        found, expected = (
            Worker(SHAPES[name], ranks, dtype, mask, rank=ranks - 1).steps(kernels)
            for kernels in (compiled, torch_ops)
        )
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_may_have_any_type_and_strides_or_be_none(compiled, dtype):
    """Gradients and parameters that are None, half, transposed, expanded, or start in the middle of a storage, mixed."""
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
    )
    assert torch.equal(storage, before)


def test_padding_is_never_read(kernels):
    """NaN right behind the end of every gradient, and in the padding of the variance, changes nothing."""
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


@pytest.mark.parametrize("mask", MASKS)
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


def test_autograd_notices_an_update(kernels):
    """backward through a graph that holds a parameter's old value raises, as after any change in place."""
    worker = Worker([(5,)])
    x = worker.parameters[0].requires_grad_()
    loss = (x * x).sum()
    with torch.no_grad():
        worker.step(kernels, worker.gradients[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- threads, processes and compilation on the CPU


LARGE = [(70 * BLOCK + 5,), (3,), (40 * BLOCK,)]


@pytest.mark.parametrize("openmp", [True, False], ids=["OpenMP's threads", "Python's threads"])
def test_results_do_not_depend_on_the_number_of_threads(cpu, openmp, monkeypatch):
    """1, 2, 3 and 5 threads give the same bits."""
    if not openmp:
        monkeypatch.setattr(cpu, "_openmp", lambda: None)
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(Worker(LARGE).steps(cpu))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("openmp", [True, False], ids=["OpenMP's threads", "Python's threads"])
def test_calls_from_several_threads_at_once_do_not_disturb_each_other(cpu, openmp, monkeypatch):
    """8 threads with a worker each get what one after the other would, and all return."""
    if not openmp:
        monkeypatch.setattr(cpu, "_openmp", lambda: None)
    torch.set_num_threads(2)
    workers = [
        [Worker(LARGE[: 1 + i % 3], 1 + i % 2) for i in range(8)] for _ in range(2)
    ]  # made one by one: they use torch's seed
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda worker: worker.steps(cpu), workers[0]))
    for result, worker in zip(found, workers[1]):
        assert_same(result, worker.steps(cpu))


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork"
)
def test_kernels_work_in_a_forked_child(cpu):
    """After the parent has used its threads, a child, which has none of them, gets the same message."""
    torch.set_num_threads(2)
    worker = Worker(LARGE)

    def message():
        return (
            cpu.compress(
                worker.partition, Terms(worker.gradients[0], worker.numbers), *worker.worker, out
            )[0]
            .numpy()
            .tobytes()
        )

    out = torch.empty_like(worker.worker[0])
    in_parent = message()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send_bytes(message()), daemon=True)
    child.start()
    assert receiver.poll(30), "the child hangs"
    assert receiver.recv_bytes() == in_parent
    child.join(30)
    assert child.exitcode == 0


def test_no_two_compiled_functions_share_a_name(loops):
    """Else one from the cache may be called in place of the other: symbols differ by more than the counter that a process adds."""
    functions = [
        getattr(loops, name)(T)
        for name in ("measure", "compress", "average", "update", "finish")
        for T in (np.float32, np.float64)
    ]
    names = [re.sub(r"B\d+v\d+", "", function.native_name) for function in functions]
    names += [x.py_func.__qualname__ for x in vars(loops).values() if hasattr(x, "py_func")]
    assert len(set(names)) == len(names)


def test_the_table_of_blocks_is_what_the_loops_take_it_for(loops):
    """int64 columns in the order of `Column`."""
    assert loops.ROW.names == tuple(column.name.lower() for column in sorted(Column))
    assert Layout([(5,)], 1).worker_partition().blocks.stride() == (loops.ROW_BYTES // 8, 1)
