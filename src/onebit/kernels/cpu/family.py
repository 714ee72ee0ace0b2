"""The loops of 1-bit LAMB and 0/1 Adam, see `loops`."""

import numpy as np

from onebit.kernels.cpu.task import (
    ROW,
    ROW_BYTES,
    address_of,
    bits_at,
    bounded_move,
    compensate,
    elements_at,
    inner,
    look_ahead,
    mask_at,
    over_blocks,
    overwrite,
    padded_at,
    scale_at,
    write_back,
)
from onebit.kernels.cpu.vectors import (
    LANES,
    add_halves,
    fence,
    finite_bits,
    greater,
    load,
    load_vector,
    nan_bits,
    nonzero_bits,
    pointer,
    record,
    select,
    size_of,
    splat,
    square_root,
    store,
)
from onebit.layout import BLOCK


@over_blocks
def compress_path_blocks(T, task, block, b, padded, ones):
    g, mask, signs = (
        padded_at(T, task, block, task.tensors, padded),
        mask_at(task, block, ones),
        bits_at(task.outgoing, block.start),
    )
    weight, beta, rest, rate, total = (
        pointer(T, task.weights)[block.group],
        pointer(T, task.beta1s)[block.group],
        pointer(T, task.rest1s)[block.group],
        pointer(T, task.rates)[block.group],
        pointer(T, task.path_totals)[block.group],
    )
    scale, lanes = pointer(T, task.scales)[block.group], splat(0.0)
    plus, minus = splat(scale), splat(-scale)
    start = block.start * size_of(T)
    for i in range(0, block.length, LANES):
        byte, at = i // 8, i * size_of(T)
        look_ahead(T, g + at)
        look_ahead(T, task.momentum + start + at)
        m = load_vector(T, task.momentum + start + at) * splat(beta)
        z = m + load_vector(T, g + at) * splat(weight) * splat(rest)
        if total != 0:
            u = z * splat(rate)
            if task.accumulator != 0:
                look_ahead(T, task.accumulator + start + at)
                u = load_vector(T, task.accumulator + start + at) + u
            z = u / splat(total)
        lanes = compensate(
            T,
            z,
            task.vector + start + at,
            plus,
            minus,
            load(np.uint64, mask + byte),
            task.out + start + at,
            signs + byte,
            lanes,
        )
    pointer(np.float64, task.sums)[b] = add_halves(lanes)


@over_blocks
def zero_one_local_blocks(T, task, block, b, padded, ones):
    if block.group >= task.tensor_count:
        return
    g = padded_at(T, task, block, task.tensors, padded)
    elements = elements_at(T, task, block, task.parameters)
    x = padded_at(T, task, block, task.parameters, padded[BLOCK:]) if elements != 0 else elements
    weight, zero = splat(pointer(T, task.weights)[block.group]), splat(T(0))
    beta, rest, rate = (
        splat(pointer(T, task.beta1s)[block.group]),
        splat(pointer(T, task.rest1s)[block.group]),
        splat(pointer(T, task.rates)[block.group]),
    )
    decay, step, eps = (
        splat(pointer(T, task.decays)[block.group]),
        splat(pointer(T, task.steps)[block.group]),
        splat(pointer(T, task.epsilons)[block.group]),
    )
    limit, bounded = pointer(T, task.limits)[block.group], 0
    above, below = splat(limit), splat(-limit)
    start = block.start * size_of(T)
    momentum, path, variance = task.momentum + start, task.accumulator + start, task.vector + start
    taken_anyway = np.uint64(0) if task.only_finite else ~np.uint64(0)
    for i in range(0, block.length, LANES):
        at = i * size_of(T)
        look_ahead(T, g + at)
        look_ahead(T, variance + at)
        look_ahead(T, path + at)
        v = load_vector(T, variance + at)
        own = load_vector(T, g + at) * weight
        taken = greater(v, zero) & (finite_bits(own) | taken_anyway)
        own = select(taken, own, zero)
        m = load_vector(T, momentum + at) * beta + own * rest
        store(momentum + at, m)
        store(path + at, load_vector(T, path + at) + m * rate)
        if elements != 0:
            before = load_vector(T, x + at)
            if task.anchor != 0:
                store(task.anchor + start + at, before)
            move = m * step
            moves = nonzero_bits(move)
            move, beyond = bounded_move(move / (square_root(v) + eps), above, below, moves)
            store(x + at, before * decay - select(moves, move, zero))
            bounded += beyond
    pointer(np.int64, task.bounded)[b] = bounded
    write_back(T, block, x, elements)


@over_blocks
def zero_one_sync_blocks(T, task, block, b, padded, ones):
    if block.group >= task.tensor_count:
        return
    elements = elements_at(T, task, block, task.tensors)
    x = padded_at(T, task, block, task.tensors, padded) if elements != 0 else elements
    mask, signs = mask_at(task, block, ones), bits_at(task.incoming, block.start)
    received = load(T, scale_at(T, task.incoming, block.piece))
    step_m = received * pointer(T, task.steps)[block.group]
    moving = np.uint64(0) if step_m == 0 else ~np.uint64(0)
    m_plus, m_minus, plus, minus = splat(received), splat(-received), splat(step_m), splat(-step_m)
    decay, eps, zero = (
        splat(pointer(T, task.decays)[block.group]),
        splat(pointer(T, task.epsilons)[block.group]),
        splat(T(0)),
    )
    limit, bounded = pointer(T, task.limits)[block.group], 0
    above, below = splat(limit), splat(-limit)
    start = block.start * size_of(T)
    source = x if task.anchor == 0 else task.anchor + start
    for i in range(0, block.length, LANES):
        byte, at = i // 8, i * size_of(T)
        look_ahead(T, task.vector + start + at)
        active, bits = load(np.uint64, mask + byte), load(np.uint64, signs + byte)
        overwrite(task.momentum + start + at, select(active, select(bits, m_plus, m_minus), zero))
        if elements != 0:
            look_ahead(T, source + at)
            active = active & moving
            move = select(bits, plus, minus) / (
                square_root(load_vector(T, task.vector + start + at)) + eps
            )
            move, beyond = bounded_move(move, above, below, active)
            store(x + at, load_vector(T, source + at) * decay - select(active, move, zero))
            bounded += beyond
    pointer(np.int64, task.bounded)[b] = bounded
    fence()
    write_back(T, block, x, elements)


@over_blocks
def lamb_follow_blocks(T, task, block, b, padded, ones):
    if block.group >= task.tensor_count:
        return
    mask, signs, last_signs = (
        mask_at(task, block, ones),
        bits_at(task.incoming, block.start),
        bits_at(task.before, block.start),
    )
    beta1, beta2 = pointer(T, task.beta1s)[block.group], pointer(T, task.beta2s)[block.group]
    z = load(T, scale_at(T, task.incoming, block.piece))
    m = load(T, scale_at(T, task.before, block.piece)) * beta1
    # g^2 has only two values: where the momentum's sign is the same as before, and where not
    kept, turned = (z - m) / (T(1) - beta1), (z + m) / (T(1) - beta1)
    same = splat((T(1) - beta2) * kept * kept)
    other = splat((T(1) - beta2) * turned * turned)
    decay, eps, zero = splat(beta2), splat(pointer(T, task.epsilons)[block.group]), splat(T(0))
    lowest = splat(T(-np.inf))
    largest = lowest
    start = block.start * size_of(T)
    for i in range(0, block.length, LANES):
        byte, at = i // 8, start + i * size_of(T)
        look_ahead(T, task.vector + at)
        look_ahead(T, task.fresh + at)
        v = load_vector(T, task.vector + at)
        turns = load(np.uint64, signs + byte) ^ load(np.uint64, last_signs + byte)
        added = select(load(np.uint64, mask + byte), select(turns, other, same), zero)
        fresh = load_vector(T, task.fresh + at) * decay + added
        store(task.fresh + at, fresh)
        if task.of_roots:
            ratio = (square_root(v) + eps) / (square_root(fresh) + eps)
        else:
            ratio = v / fresh
        ratio = select(greater(v, zero), ratio, lowest)
        largest = select(greater(ratio, largest) | nan_bits(ratio), ratio, largest)
    store(address_of(padded), largest)
    pointer(T, task.largest)[b] = largest_of(padded[:LANES])


# ---- after all blocks


@inner
def largest_of(numbers):
    """The largest; NaN if one is NaN."""
    largest = numbers[0]
    for x in numbers:
        if x > largest or x != x:
            largest = x
    return largest


@inner
def finish_largest(T, task):
    """The largest of each group, T [groups], from those of the blocks; -inf without blocks."""
    largest = pointer(T, task.new_scales)
    for group in range(task.group_count):
        largest[group] = T(-np.inf)
    for b in range(task.block_count):
        group, x = record(ROW, task.blocks + b * ROW_BYTES).group, pointer(T, task.largest)[b]
        if x > largest[group] or x != x:
            largest[group] = x
