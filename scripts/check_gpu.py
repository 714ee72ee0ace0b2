"""Do the CUDA kernels give the bits of their definition on this machine, and how fast are they?

scripts/check_gpu.sh runs this. It prints what it does and, at the end, a table. The exit code is 1
if a result is wrong and 2 if something is missing.
"""

import math
import socket
import sys
import threading
import time
import warnings
from functools import partial
from importlib import import_module
from itertools import cycle
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

from onebit.kernels import torch_ops
from onebit.layout import BLOCK, Layout

REPETITIONS = 30
ODD_SHAPES = (
    (7, 13),
    (),
    (129,),
    (0, 10),
    (3, 5, 2),
    (2 * BLOCK + 808,),
    (64,),
    (5000, 2),
    (BLOCK,),
    (63,),
    (1,),
)
BERT_BASE = (
    (30522, 768),
    (512, 768),
    *[(768, 768), (768, 768), (768, 768), (768, 768), (3072, 768), (768, 3072), *[(768,)] * 10]
    * 12,
)
SINGLE, DOUBLE, HALF, BFLOAT16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


# ---- are they right?


class Case(NamedTuple):
    """Some steps of `ranks` workers and servers.

    dtype: of the state.
    types: of the gradients and the parameters, in turn; None: no gradient.
    masked: the share of masked coordinates. Unless it is 0, some whole blocks have none of them
        and others have nothing else.
    """

    shapes: tuple = ODD_SHAPES
    ranks: int = 2
    dtype: torch.dtype = SINGLE
    types: tuple = (SINGLE, BFLOAT16, HALF, None, DOUBLE)
    masked: float = 0.1
    steps: int = 3


CASES = [
    *[
        Case(ranks=ranks, dtype=dtype, masked=masked)
        for ranks in (1, 2, 3)
        for dtype in (SINGLE, DOUBLE)
        for masked in (0, 0.1)
    ],
    Case(ranks=40, steps=2),
    Case(masked=1),
    Case(shapes=((1 << 24,), (1000, 1001)), types=(SINGLE,), masked=0, steps=2),
    Case(shapes=((1 << 24,), (1000, 1001)), types=(BFLOAT16, HALF), steps=2),
]


def described(case):
    types = " ".join(str(dtype).removeprefix("torch.") for dtype in case.types if dtype)
    state = str(case.dtype).removeprefix("torch.")
    return (
        f"{sum(map(math.prod, case.shapes)):,} elements, {case.ranks} ranks, state {state}, "
        f"tensors {types}, {case.masked:.0%} masked"
    )


def active_elements(layout, masked, generator):
    active = layout.real & (torch.rand(layout.size, generator=generator) >= masked)
    if 0 < masked < 1:
        active[layout.size // 2 :][:BLOCK] = False
        active[: 2 * BLOCK] = layout.real[: 2 * BLOCK]
    return active


def tensors(case, generator, device, absent=True):
    """A random tensor for each shape, some of them with strides, some at an odd address."""
    made = []
    for i, (shape, dtype) in enumerate(zip(case.shapes, cycle(case.types))):
        x = torch.randn(math.prod(shape) + 1, generator=generator).to(device, dtype or SINGLE)[
            i % 2 :
        ][: math.prod(shape)]
        made.append(
            x.view(shape[::-1]).permute(*reversed(range(len(shape))))
            if i % 3 == 0
            else x.view(shape)
        )
        if dtype is None and absent:
            made[-1] = None
    return made


def outcome(case, kernels, device):
    """{what: tensor on the CPU}: all that `kernels` give in these steps on `device`."""
    generator = torch.Generator().manual_seed(1)
    active = (
        active_elements(Layout(case.shapes, case.ranks), case.masked, generator).to(device)
        if case.masked
        else None
    )
    layout, count, ranks = (
        Layout(case.shapes, case.ranks, device),
        len(case.shapes),
        range(case.ranks),
    )
    zeros = partial(torch.zeros, dtype=case.dtype, device=device)
    worker = layout.worker_partition(active)
    servers = [layout.server_partition(rank, worker) for rank in ranks]
    errors = [
        2 * (zeros(layout.size),) if rank == 0 else (zeros(layout.size), zeros(layout.size))
        for rank in ranks
    ]  # rank 0 in place
    scales = [zeros(count + 1) for _ in ranks]
    chunks, chunk_scales = (
        [zeros(layout.chunk) for _ in ranks],
        [zeros(len(server.lengths)) for server in servers],
    )
    variance = torch.rand(layout.size, generator=generator, dtype=case.dtype).to(device)
    parameters = tensors(case, generator, device, absent=False)
    weights, betas, decays, steps, epsilons = (
        [(0.1, 0.7, 1 / 3, 1.0)[(i + j) % 4] for i in range(count)] for j in range(5)
    )
    limits = [(0.3, math.inf, 0.05)[i % 3] for i in range(count)]
    momentum, found = None, {}

    def keep(what, *values):
        found.update({f"{what}, {i}": value.to("cpu", copy=True) for i, value in enumerate(values)})

    for step in range(case.steps):
        payloads, means = [], []
        for rank in ranks:
            gradients = tensors(case, generator, device)
            old, new = errors[rank]
            keep(f"measure, step {step}, rank {rank}", kernels.measure(worker, gradients))
            terms = torch_ops.Terms(gradients, weights, momentum, betas if step else ())
            payload, scales[rank] = kernels.compress(worker, terms, old, scales[rank], new)
            keep(f"compress, step {step}, rank {rank}", payload, scales[rank], new)
            errors[rank] = new, old
            payloads.append(payload)
        for rank in ranks:
            received = torch.stack([payload[rank] for payload in payloads])
            mean, chunk_scales[rank] = kernels.average(
                servers[rank], received, chunks[rank], chunk_scales[rank], chunks[rank]
            )
            keep(f"average, step {step}, rank {rank}", mean, chunk_scales[rank], chunks[rank])
            means.append(mean)
        momentum = torch.cat(means)
        updated = [None if i == 2 else x for i, x in enumerate(parameters)]
        numbers = decays, steps, epsilons, limits
        bounded = kernels.update(worker, updated, variance, momentum, *numbers)
        keep(f"update, step {step}", *parameters, bounded)
    gradient, momentum = (
        torch.randn(layout.size, generator=generator, dtype=case.dtype).to(device) for _ in range(2)
    )
    kernels.adam(
        worker,
        updated,
        gradient,
        momentum,
        variance,
        betas,
        decays,
        steps,
        decays,
        epsilons,
        weights,
    )
    keep("adam", *parameters, *(x[layout.real] for x in (momentum, variance)))
    return found


def differences(expected, found):
    """The names under which the two outcomes are not the same bits."""
    assert expected.keys() == found.keys()
    return [
        name
        for name, x in expected.items()
        if x.dtype != found[name].dtype or not torch.equal(x, found[name])
    ]


def two_streams(case, kernels, device):
    """The outcomes of two threads that work at once, each on a stream of its own."""
    found = []

    def work():
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            found.append(outcome(case, kernels, device))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def check_results(kernels, devices, cases=CASES):
    """Rows of the table: (what, result, right?)."""
    rows = []
    for case in cases:
        print(f"checking {described(case)}", flush=True)
        expected = outcome(case, torch_ops, torch.device("cpu"))
        for device in devices:
            wrong = differences(expected, outcome(case, kernels, device))
            rows.append(
                (
                    described(case),
                    f"WRONG on {device}: {wrong[:4]}" if wrong else "equal",
                    not wrong,
                )
            )
    if devices[0].type == "cuda":
        found = two_streams(CASES[-1], kernels, devices[0])
        right = len(found) == 2 and not any(differences(expected, other) for other in found)
        rows.append(
            ("the same from two threads on two streams", "equal" if right else "WRONG", right)
        )
    return rows


# ---- how fast are they?


def seconds(*functions):
    """The median time of each on the GPU; they take turns."""
    times = [[] for _ in functions]
    for repetition in range(REPETITIONS + 3):
        for function, own in zip(functions, times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            own.append((begin, end))
    torch.cuda.synchronize()
    return [median(begin.elapsed_time(end) for begin, end in own[3:]) / 1e3 for own in times]


def check_speed(kernels, device, n, ranks=8):
    """Each kernel's GB/s beside those of a copy of as many bytes."""
    layout = Layout([(n,)], ranks, device)
    worker = layout.worker_partition()
    server = layout.server_partition(0, worker)
    x, g, v, c = (torch.rand(n, device=device) for _ in range(4))
    scales = torch.ones(2, device=device)
    payload, _ = kernels.compress(worker, torch_ops.Terms([g], [0.1]), c, scales, c)
    chunk, chunk_scales = (
        torch.zeros(layout.chunk, device=device),
        torch.ones(len(server.lengths), device=device),
    )
    terms = torch_ops.Terms([g], [0.1], payload, [0.9])
    calls = [
        ("measure", 4 * n, lambda: kernels.measure(worker, [g])),
        ("compress", 12.25 * n, lambda: kernels.compress(worker, terms, c, scales, c)),
        (
            "average",
            (ranks / 8 + 8.125) * layout.chunk,
            lambda: kernels.average(server, payload, chunk, chunk_scales, chunk),
        ),
        (
            "update",
            12.125 * n,
            lambda: kernels.update(worker, [x], v, payload, [1.0], [1e-3], [1e-8], [3e-3]),
        ),
        (
            "adam",
            28 * n,
            lambda: kernels.adam(
                worker, [x], g, c, v, [0.9], [0.999], [1.0], [1e-3], [1e-8], [1.0]
            ),
        ),
    ]
    rows = []
    for name, count, call in calls:
        source, target = torch.empty(2, int(count // 2), dtype=torch.uint8, device=device)
        own, copy = seconds(call, partial(target.copy_, source))
        rows.append(
            (
                f"{name}, {n >> 20}M elements",
                f"{count / own / 1e9:7.0f} GB/s, {copy / own:4.0%} of copy's "
                f"{count / copy / 1e9:.0f}",
                True,
            )
        )
    return rows


# ---- the whole step


def step_seconds(communicator, device, all_reduce):
    """(1-bit Adam's compressed step, all_reduce + Adam(fused=True), the first one's parameters)."""
    from onebit import OneBitAdam

    models = [
        [torch.nn.Parameter(torch.full(shape, 0.1, device=device)) for shape in BERT_BASE]
        for _ in range(2)
    ]
    generator = torch.Generator(device).manual_seed(communicator.rank)
    flat = torch.randn(sum(map(math.prod, BERT_BASE)), generator=generator, device=device)
    for model in models:
        for x, g in zip(model, flat.split([math.prod(shape) for shape in BERT_BASE])):
            x.grad = g.view(x.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a short warm-up
        compressed = OneBitAdam(models[0], lr=1e-3, warmup=1, communicator=communicator)
        compressed.step()
    adam = torch.optim.Adam(models[1], lr=1e-3, fused=True)

    def exact_step():
        all_reduce(flat)
        adam.step()

    return *seconds(compressed.step, exact_step), torch.cat(
        [x.detach().flatten() for x in models[0]]
    )


def step_row(ranks, own, adam):
    n = sum(map(math.prod, BERT_BASE))
    what = "all_reduce + Adam(fused=True)" if ranks > 1 else "Adam(fused=True)"
    return (
        f"whole step, {n >> 20}M elements, {ranks} GPU{'s' * (ranks > 1)}",
        f"{own * 1e3:.2f} ms; {what}: {adam * 1e3:.2f} ms",
    )


def one_of_several(rank, ranks, address, answers):
    """A process with a GPU of its own."""
    from onebit.comm import TorchDistributed

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=ranks, device_id=device
    )
    own, adam, x = step_seconds(TorchDistributed(), device, dist.all_reduce)
    first = x.clone()
    dist.broadcast(first, 0)
    equal = torch.tensor(float(torch.equal(first, x)), device=device)
    dist.all_reduce(equal)
    if rank == 0:
        answers.put((own, adam, equal.item() == ranks))
    dist.destroy_process_group()


def check_step(device):
    from onebit.comm import Single

    rows = [(*step_row(1, *step_seconds(Single(), device, lambda flat: None)[:2]), True)]
    ranks = torch.cuda.device_count()
    if ranks > 1:
        answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        torch.multiprocessing.spawn(one_of_several, (ranks, address, answers), ranks)
        own, adam, right = answers.get()
        name, times = step_row(ranks, own, adam)
        rows.append(
            (name, times if right else f"WRONG: the ranks' parameters differ; {times}", right)
        )
    return rows


def missing():
    """What this machine lacks, with the remedy; None if nothing."""
    if not torch.cuda.is_available():
        return (
            "no NVIDIA GPU that PyTorch can use (torch.cuda.is_available() is False). Look at "
            f"nvidia-smi for the driver; this PyTorch is {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}"
        )
    try:
        import_module("cupy")
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        return f"CuPy cannot be imported ({error}). Install it: pip install cupy-cuda{major}x"
    return None


def main():
    lack = missing()
    if lack:
        print(f"check_gpu: {lack}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    kernels = import_module("onebit.kernels.cuda")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    rows = check_results(kernels, devices)
    for n in (1 << 24, 1 << 26):
        print(f"timing the kernels at {n >> 20}M elements", flush=True)
        rows += check_speed(kernels, devices[0], n)
    print("timing whole steps", flush=True)
    rows += check_step(devices[0])
    print(
        f"\n{torch.cuda.get_device_name(0)} x {len(devices)}, PyTorch {torch.__version__}, "
        f"{time.monotonic() - begin:.0f} s\n"
    )
    width = max(len(name) for name, _, _ in rows)
    for name, result, _ in rows:
        print(f"{name:{width}}  {result}")
    return 0 if all(right for _, _, right in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
