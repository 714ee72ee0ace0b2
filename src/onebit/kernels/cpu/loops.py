"""The compiled part of the CPU kernels.

`@inner` functions are compiled by numba and call each other. The C functions at the end are what
Python calls; each takes the address of a `TASK`, a record with the addresses of all arrays. Several
threads may call one on the same task at once: they share out the blocks among themselves, without
the GIL. The result of a block depends on that block only, so that the number of threads changes
nothing. T is the NumPy type of the elements.
"""

import hashlib
import inspect
import logging
import os
import warnings
from functools import cache
from pathlib import Path

import numpy as np
from numba import cfunc, njit
from numba.core import event

from onebit import layout
from onebit.kernels.cpu import vectors as cpu_vectors
from onebit.kernels.cpu.vectors import (
    LANES,
    add_halves,
    add_squares,
    count_ones,
    fetch_and_increment,
    greater,
    load,
    load_vector,
    nonzero_bits,
    pointer,
    record,
    select,
    sign_bits,
    size_of,
    splat,
    square_root,
    store,
)
from onebit.layout import BLOCK, Column


def _integers(*names):
    return [(name, np.int64) for name in names]


ROW = np.dtype(_integers(*(column.name.lower() for column in Column)))  # of the table of blocks
ROW_BYTES = ROW.itemsize
# a payload; `pieces` are those of one row, the other fields are as in `torch_ops`
MESSAGE = np.dtype(_integers("address", "row_elements", "row_bytes", "pieces"))
# Everything that is neither a count nor a message is an address. Addresses that a function does not
# use may be 0.
TASK = np.dtype(
    [
        # the number of equal ranges of blocks, and the next range that no thread has taken
        *_integers("next_part", "parts"),
        # the partition
        *_integers("block_count", "blocks", "mask"),
        *_integers("group_count", "counts", "piece_count", "piece_groups"),
        # int64: the tensors' addresses, or 0 for None
        *_integers("tensor_count", "tensors"),
        # T, for each tensor and the tail
        *_integers("weights", "betas"),
        # T, for each tensor; a rest is 1 - beta
        *_integers("decays", "steps", "epsilons", "limits", "roots"),
        *_integers("beta1s", "rest1s", "beta2s", "rest2s"),
        # T; `vector` is c or v
        *_integers("vector", "scales", "out", "new_scales", "gradient", "momentum"),
        # for each block: the sum of squares, float64; int64: the masked elements that are not 0,
        # and those whose move was beyond the limit
        *_integers("sums", "late", "bounded"),
        # float64 [2]: the totals of these two
        *_integers("totals"),
        *(("incoming", MESSAGE), ("row_count", np.int64), ("outgoing", MESSAGE)),
    ]
)

# No option, here or below, allows the compiler to reorder or fuse floating-point operations.
inner = njit(error_model="numpy")


def named(name, function):
    """`function` under the name that its compiled code has in numba's cache and in the process.

    Names must be unique: of two functions with one name, one would run in place of the other.
    """
    function.__qualname__ = name
    return function


# ---- messages and blocks


@inner
def bits_at(message, start):
    """Address of the bits of elements start, start + 1, ...; start is a multiple of ALIGNMENT."""
    return (
        message.address
        + start // message.row_elements * message.row_bytes
        + start % message.row_elements // 8
    )


@inner
def scale_at(T, message, piece):
    """Address of the scale of a piece."""
    row, i = piece // message.pieces, piece % message.pieces
    return message.address + row * message.row_bytes + message.row_elements // 8 + i * size_of(T)


@inner
def address_of(array):
    return np.int64(array.ctypes.data)


@inner
def mask_at(task, block, ones):
    """Address of the mask's bits for a block; of `ones` if all its elements are active."""
    return address_of(ones) if block.full else task.mask + block.start // 8


@inner
def elements_at(T, task, block):
    """Address of a block's elements in its tensor; 0 if there are none."""
    tensor = pointer(np.int64, task.tensors)[block.group] if block.group < task.tensor_count else 0
    return tensor + block.offset * size_of(T) if tensor != 0 and block.real > 0 else 0


@inner
def padded_at(T, task, block, padded):
    """As `elements_at`, but with all LENGTH elements, padding being 0.

    A block with padding is copied to `padded`, T [BLOCK].
    """
    elements = elements_at(T, task, block)
    if elements != 0 and block.real == block.length:
        return elements
    padded[:] = 0
    if elements != 0:
        for i in range(block.real):
            padded[i] = pointer(T, elements)[i]
    return address_of(padded)


@inner
def write_back(T, block, x, elements):
    """Copy what was changed at x back to the block's elements in its tensor, if x is a copy."""
    if elements != 0 and x != elements:
        for i in range(block.real):
            pointer(T, elements)[i] = pointer(T, x)[i]


def over_blocks(work):
    """Turn work on one block into a loop over all blocks that no other thread has taken.

    work(T, task, block, its number, padded, ones) -> loop(T, address of the task)
    """
    work = inner(work)

    def loop(T, address):
        task, padded, ones = (
            record(TASK, address),
            np.empty(BLOCK, T),
            np.full(BLOCK // 8, 255, np.uint8),
        )
        while True:
            part = fetch_and_increment(address)
            if part >= task.parts:
                return
            for b in range(
                task.block_count * part // task.parts, task.block_count * (part + 1) // task.parts
            ):
                work(T, task, record(ROW, task.blocks + b * ROW_BYTES), b, padded, ones)

    return inner(named(f"loop_of_{work.__name__}", loop))


# ---- the work on one block


@over_blocks
def measure_blocks(T, task, block, b, padded, ones):
    g, mask = padded_at(T, task, block, padded), mask_at(task, block, ones)
    lanes, late = splat(0.0), 0
    for i in range(0, block.length, LANES):
        x = load_vector(T, g + i * size_of(T))
        lanes = add_squares(lanes, x)
        late += count_ones(nonzero_bits(x) & ~load(np.uint64, mask + i // 8))
    pointer(np.float64, task.sums)[b], pointer(np.int64, task.late)[b] = add_halves(lanes), late


@inner
def compensate(T, z, vector, plus, minus, active, out, signs, lanes):
    """One Vector of the lazy error: c = z + e where active, else 0; `lanes` plus the squares of c.

    e is the last c, at the address `vector`, minus its scale times its sign; plus and minus are
    that scale and its negative. c is written to the address `out`, its signs to `signs`.
    """
    last = load_vector(T, vector)
    c = select(active, z + (last - select(sign_bits(last), plus, minus)), splat(T(0)))
    store(out, c)
    store(signs, sign_bits(c))
    return add_squares(lanes, c)


@over_blocks
def compress_blocks(T, task, block, b, padded, ones):
    g, mask, signs = (
        padded_at(T, task, block, padded),
        mask_at(task, block, ones),
        bits_at(task.outgoing, block.start),
    )
    m, beta_m = mask, T(0)  # without momentum: zeros, for which any bits will do
    if task.incoming.address != 0:
        m = bits_at(task.incoming, block.start)
        beta_m = (
            load(T, scale_at(T, task.incoming, block.piece)) * pointer(T, task.betas)[block.group]
        )
    weight, m_plus, m_minus = (
        splat(pointer(T, task.weights)[block.group]),
        splat(beta_m),
        splat(-beta_m),
    )
    scale, lanes = pointer(T, task.scales)[block.group], splat(0.0)
    plus, minus = splat(scale), splat(-scale)
    vector, out = task.vector + block.start * size_of(T), task.out + block.start * size_of(T)
    for i in range(0, block.length, LANES):
        byte, at = i // 8, i * size_of(T)
        z = load_vector(T, g + at) * weight + select(load(np.uint64, m + byte), m_plus, m_minus)
        lanes = compensate(
            T,
            z,
            vector + at,
            plus,
            minus,
            load(np.uint64, mask + byte),
            out + at,
            signs + byte,
            lanes,
        )
    pointer(np.float64, task.sums)[b] = add_halves(lanes)


@over_blocks
def average_blocks(T, task, block, b, padded, ones):
    received, mask, signs = (
        bits_at(task.incoming, block.start),
        mask_at(task, block, ones),
        bits_at(task.outgoing, block.start),
    )
    row_bytes, rows = task.incoming.row_bytes, task.row_count
    row_scales = np.empty((rows, 2), T)
    for row in range(rows):
        row_scale = load(T, scale_at(T, task.incoming, block.piece) + row * row_bytes) / T(rows)
        row_scales[row, 0], row_scales[row, 1] = row_scale, -row_scale
    scale, lanes = pointer(T, task.scales)[block.group], splat(0.0)
    plus, minus = splat(scale), splat(-scale)
    vector, out = task.vector + block.start * size_of(T), task.out + block.start * size_of(T)
    for i in range(0, block.length, LANES):
        byte, at = i // 8, i * size_of(T)
        z = select(
            load(np.uint64, received + byte), splat(row_scales[0, 0]), splat(row_scales[0, 1])
        )
        for row in range(1, rows):
            z = z + select(
                load(np.uint64, received + row * row_bytes + byte),
                splat(row_scales[row, 0]),
                splat(row_scales[row, 1]),
            )
        lanes = compensate(
            T,
            z,
            vector + at,
            plus,
            minus,
            load(np.uint64, mask + byte),
            out + at,
            signs + byte,
            lanes,
        )
    pointer(np.float64, task.sums)[b] = add_halves(lanes)


@over_blocks
def update_blocks(T, task, block, b, padded, ones):
    elements = elements_at(T, task, block)
    if elements == 0:
        return
    x, mask, m = (
        padded_at(T, task, block, padded),
        mask_at(task, block, ones),
        bits_at(task.incoming, block.start),
    )
    step_m = load(T, scale_at(T, task.incoming, block.piece)) * pointer(T, task.steps)[block.group]
    # Where step, v and eps are 0, the move would be 0 / 0; then nothing moves.
    moving = np.uint64(0) if step_m == 0 else ~np.uint64(0)
    plus, minus, zero = splat(step_m), splat(-step_m), splat(T(0))
    variance = task.vector + block.start * size_of(T)
    decay, eps = (
        splat(pointer(T, task.decays)[block.group]),
        splat(pointer(T, task.epsilons)[block.group]),
    )
    limit, bounded = pointer(T, task.limits)[block.group], 0
    above, below = splat(limit), splat(-limit)
    for i in range(0, block.length, LANES):
        byte, at = i // 8, i * size_of(T)
        active = load(np.uint64, mask + byte) & moving
        move = select(load(np.uint64, m + byte), plus, minus) / (
            square_root(load_vector(T, variance + at)) + eps
        )
        over, under = greater(move, above), greater(below, move)
        bounded += count_ones((over | under) & active)
        move = select(over, above, select(under, below, move))
        store(x + at, load_vector(T, x + at) * decay - select(active, move, zero))
    pointer(np.int64, task.bounded)[b] = bounded
    write_back(T, block, x, elements)


@over_blocks
def adam_blocks(T, task, block, b, padded, ones):
    if block.group >= task.tensor_count:
        return
    elements, x = elements_at(T, task, block), padded_at(T, task, block, padded)
    beta1, rest1 = (
        splat(pointer(T, task.beta1s)[block.group]),
        splat(pointer(T, task.rest1s)[block.group]),
    )
    beta2, rest2 = (
        splat(pointer(T, task.beta2s)[block.group]),
        splat(pointer(T, task.rest2s)[block.group]),
    )
    decay, step = (
        splat(pointer(T, task.decays)[block.group]),
        splat(pointer(T, task.steps)[block.group]),
    )
    root, eps = (
        splat(pointer(T, task.roots)[block.group]),
        splat(pointer(T, task.epsilons)[block.group]),
    )
    start = block.start * size_of(T)
    gradient, momentum, variance = task.gradient + start, task.momentum + start, task.vector + start
    for i in range(0, block.length, LANES):
        at = i * size_of(T)
        g = load_vector(T, gradient + at)
        m = load_vector(T, momentum + at) * beta1 + g * rest1
        v = load_vector(T, variance + at) * beta2 + g * g * rest2
        store(momentum + at, m)
        store(variance + at, v)
        store(x + at, load_vector(T, x + at) * decay - m * step / (square_root(v) * root + eps))
    write_back(T, block, x, elements)


# ---- after all blocks


@inner
def sum_in_lanes(numbers, count):
    """The sum of float64 numbers at an address, in the order of `torch_ops`."""
    lanes, width = np.zeros(LANES), LANES
    for i in range(count):
        lanes[i % LANES] += pointer(np.float64, numbers)[i]
    while width > 1:
        width //= 2
        for j in range(width):
            lanes[j] += lanes[j + width]
    return lanes[0]


@inner
def group_sums(task):
    """float64 [groups] from the blocks' sums. The blocks of a group are neighbours."""
    sums, b = np.zeros(task.group_count), 0
    while b < task.block_count:
        first, group = b, record(ROW, task.blocks + b * ROW_BYTES).group
        while b < task.block_count and record(ROW, task.blocks + b * ROW_BYTES).group == group:
            b += 1
        sums[group] = sum_in_lanes(task.sums + first * size_of(np.float64), b - first)
    return sums


@inner
def finish_measure(task):
    """The squared norm, and the number of masked elements that are not zero."""
    late, sums = 0, group_sums(task)
    square = sum_in_lanes(address_of(sums), task.group_count)
    for b in range(task.block_count):
        late += pointer(np.int64, task.late)[b]
    totals = pointer(np.float64, task.totals)
    totals[0], totals[1] = square, late


@inner
def finish_message(T, task):
    """Compute the groups' new scales and write them into the outgoing message, too."""
    sums, counts, new_scales = (
        group_sums(task),
        pointer(np.float64, task.counts),
        pointer(T, task.new_scales),
    )
    for group in range(task.group_count):
        new_scales[group] = T(np.sqrt(sums[group] / counts[group]))
    for piece in range(task.piece_count):
        store(
            scale_at(T, task.outgoing, piece),
            new_scales[pointer(np.int64, task.piece_groups)[piece]],
        )


# ---- C functions of a task's address, for float32 and float64, compiled on first use


# numba's cache notices changes of this file only, so that the names carry those of the others.
_OTHER_FILES = hashlib.sha256(
    "".join(map(inspect.getsource, (layout, cpu_vectors))).encode()
).hexdigest()[:8]


class _Announcement(event.Listener):
    """Says once in a process that numba compiles. What comes from its cache is not compiled."""

    said = False
    cache_failed = False

    def on_start(self, compiling):
        if not _Announcement.said:
            _Announcement.said = True
            logging.getLogger("onebit").warning(
                "onebit: numba compiles the CPU kernels, which takes some seconds; later runs find "
                "them in its cache"
            )

    def on_end(self, compiled):
        """Nothing needs to be said then."""


def _warn_of_cache(error: Exception) -> None:
    """Warn once in a process that numba's cache is of no use."""
    if not _Announcement.cache_failed:
        _Announcement.cache_failed = True
        folder = os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent / "__pycache__"
        warnings.warn(
            f"numba's cache in {folder} cannot be used ({type(error).__name__}: {error}): "
            "the CPU kernels are compiled anew in each process. If the cache is damaged, delete "
            "its files; if the folder cannot be written or its disk is full, set NUMBA_CACHE_DIR "
            "to another folder",
            stacklevel=2,
        )


def _c_function(of_type):
    """of_type(T) -> function. Returns T -> its C function, which has .address and .ctypes."""

    @cache
    def compiled(T):
        function = named(f"{of_type.__name__}_{T.__name__}_{_OTHER_FILES}", of_type(T))
        with event.install_listener("numba:run_pass", _Announcement()):
            try:
                return cfunc("void(int64)", error_model="numpy", cache=True)(function)
            except Exception as error:  # a damaged cache raises whatever its reader does
                _warn_of_cache(error)
                return cfunc("void(int64)", error_model="numpy")(function)

    return compiled


@_c_function
def measure(T):
    return lambda address: measure_blocks(T, address)


@_c_function
def compress(T):
    return lambda address: compress_blocks(T, address)


@_c_function
def average(T):
    return lambda address: average_blocks(T, address)


@_c_function
def update(T):
    return lambda address: update_blocks(T, address)


@_c_function
def adam(T):
    return lambda address: adam_blocks(T, address)


@_c_function
def finish(T):
    """After compress or average."""
    return lambda address: finish_message(T, record(TASK, address))


@_c_function
def total(T):
    """After measure."""
    return lambda address: finish_measure(record(TASK, address))
