"""What the compiled loops share: the record that they work on, and where things are.

`@inner` functions are compiled by numba and call each other. T is the NumPy type of the elements.
"""

import numpy as np
from numba import njit

from onebit.kernels.cpu.vectors import (
    LANES,
    add_squares,
    count_ones,
    fetch_and_increment,
    greater,
    load_vector,
    pointer,
    prefetch,
    record,
    select,
    sign_bits,
    size_of,
    splat,
    store,
    store_past_caches,
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
        # of 1-bit LAMB: the momentum before; v_fresh and each block's largest ratio, T; whether the
        # ratio is that of the roots
        *(("before", MESSAGE), ("fresh", np.int64), ("largest", np.int64), ("of_roots", np.int64)),
        # of 0/1 Adam: the parameters' addresses beside the gradients' in `tensors`; T
        *_integers("parameters", "accumulator", "anchor", "rates", "path_totals", "only_finite"),
    ]
)

LINE = 64  # bytes of a cache line
AHEAD = 4096  # bytes, a page

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
def elements_at(T, task, block, tensors):
    """Address of a block's elements in its tensor; 0 if there are none.

    tensors: address of the tensors' addresses.
    """
    tensor = pointer(np.int64, tensors)[block.group] if block.group < task.tensor_count else 0
    return tensor + block.offset * size_of(T) if tensor != 0 and block.real > 0 else 0


@inner
def padded_at(T, task, block, tensors, padded):
    """As `elements_at`, but with all LENGTH elements, padding being 0.

    A block with padding is copied to `padded`, T [BLOCK].
    """
    elements = elements_at(T, task, block, tensors)
    if elements != 0 and block.real == block.length:
        return elements
    padded[: block.length] = 0
    if elements != 0:
        for i in range(block.real):
            padded[i] = pointer(T, elements)[i]
    return address_of(padded)


@inner
def look_ahead(T, address):
    """Ask for the Vector that follows AHEAD bytes after this one.

    A processor's own prefetching ends at the end of a page; measured: up to a quarter of the time.
    """
    for line in range(0, LANES * size_of(T), LINE):
        prefetch(address + AHEAD + line)


@inner
def overwrite(address, x):
    """Write a Vector over memory that is not read."""
    if address % LINE == 0:
        store_past_caches(address, x)
    else:
        store(address, x)


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
            np.empty(2 * BLOCK, T),
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


# ---- what several loops do to a Vector


@inner
def compensate(T, z, vector, plus, minus, active, out, signs, lanes):
    """One Vector of the lazy error: c = z + e where active, else 0; `lanes` plus the squares of c.

    e is the last c, at the address `vector`, minus its scale times its sign; plus and minus are
    that scale and its negative. c is written to the address `out`, its signs to `signs`.
    """
    look_ahead(T, vector)
    last = load_vector(T, vector)
    c = select(active, z + (last - select(sign_bits(last), plus, minus)), splat(T(0)))
    store(out, c)
    store(signs, sign_bits(c))
    return add_squares(lanes, c)


@inner
def bounded_move(move, above, below, active):
    """(moves brought into the limits, how many of those that are active were beyond)"""
    over, under = greater(move, above), greater(below, move)
    move = select(over, above, select(under, below, move))
    return move, count_ones((over | under) & active)
