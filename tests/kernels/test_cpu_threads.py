"""The CPU's kernels in threads and forked processes, and what numba's cache and the table of blocks
rely on.
"""

import multiprocessing
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.kernel_steps import Worker, assert_same
from helpers.sums import in_lanes, numbers_to_add

from onebit.kernels.torch_ops import Terms
from onebit.layout import BLOCK, Column, Layout

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
    """After the parent has used its threads, a child, which has none of them, gets the same
    message.
    """
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


@pytest.mark.parametrize("length", (0, 1, 64, 200))
def test_numbers_are_added_in_lanes(loops, length):
    numbers = numbers_to_add(length)
    assert loops.sum_in_lanes(numbers.data_ptr(), length) == in_lanes(numbers.tolist())


def test_no_two_compiled_functions_share_a_name(loops):
    """Else one from the cache may be called in place of the other: symbols differ by more than
    the counter that a process adds.
    """
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
