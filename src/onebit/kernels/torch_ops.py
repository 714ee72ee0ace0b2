"""The kernels' definition in plain torch, on any device. The compiled kernels give the same bits.

The elements of a vector are float32 or float64, called T here. Numbers given as Python floats are
rounded to T before use, and no product is fused with a sum. A payload is what `Sign` sends: rows of
bits, element 8 i + j being bit j of byte i, then one scale for each piece of the row, then zeros up
to a multiple of ROW_ALIGNMENT bytes.

Sums of squares are in float64 and in one order, which depends neither on threads nor on the
processor: the order of ALIGNMENT lanes. Lane j adds numbers j, j + ALIGNMENT, j + 2 ALIGNMENT, ...
one after another; then the left half of the lanes is added to the right half until one is left. So
are added the elements of a block, the blocks of a group and, in `measure`, the groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onebit.layout import ALIGNMENT, ROW_ALIGNMENT, Column, Partition, pack_bits, round_up

# [256, 8]: the 8 signs that a byte stands for
_SIGNS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(torch.int8) * 2 - 1

Tensors = Sequence[Tensor | None]  # of any floating dtype and strides
Numbers = Sequence[float]  # one for each tensor


@dataclass(frozen=True)
class Path:
    """What 0/1 Adam has gone since the last sync, as it is before a step.

    With u, by default zero, and the numbers of each tensor, a step of the gradient g gives

        m = beta m + rest g        u = u + rate m        z = u / total, or m where total is 0

    Attributes:
        momentum, accumulator: m and u, T [n]; not changed.
        betas, rests, rates, totals: one for each tensor.
    """

    momentum: Tensor
    accumulator: Tensor | None
    betas: Numbers
    rests: Numbers
    rates: Numbers
    totals: Numbers


@dataclass(frozen=True)
class Terms:
    """A vector before compression: z = beta * momentum + weight * g, with numbers for each tensor.

    Attributes:
        gradients: g of each tensor; None counts as zero.
        weights: by default 1 for each tensor.
        momentum: payload uint8 [rows, row_bytes], or None: there is no such term.
        betas: unused without momentum.
        path: z is what `Path` says, with weight * g as its gradient; there is no other momentum.
    """

    gradients: Tensors
    weights: Numbers = ()
    momentum: Tensor | None = None
    betas: Numbers = ()
    path: Path | None = None

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "weights", [1.0] * len(self.gradients))


# ---- bits and scales


def pack_signs(x: Tensor) -> Tensor:
    """float [n] -> uint8 [n / 8]: bit 1 where x >= 0, so that sign(0) = +1."""
    return pack_bits(x >= 0)


def scaled_signs(bits: Tensor, scales: Tensor, lengths: Tensor) -> Tensor:
    """uint8 [..., n / 8], one scale per group [..., groups] -> [..., n]: +scale or -scale.

    lengths: int64 [groups], the number of elements of each group.
    """
    signs = _SIGNS.to(bits.device, scales.dtype).index_select(0, bits.flatten().int())
    blocks = signs.view(*bits.shape[:-1], -1, ALIGNMENT)
    return blocks.mul_(per_block(scales, lengths)).flatten(-2)


def per_block(values: Tensor, lengths: Tensor) -> Tensor:
    """One value per group, [..., groups], for each ALIGNMENT elements: [..., n / ALIGNMENT, 1]."""
    return values.repeat_interleave(lengths // ALIGNMENT, dim=-1)[..., None]


def split_payload(
    partition: Partition, payload: Tensor, dtype: torch.dtype, bits: int = 1
) -> tuple[Tensor, Tensor]:
    """uint8 [..., rows, row_bytes] -> its codes and its scales.

    Returns the codes of `bits` bits per element, uint8 [..., n bits / 8], and the scales
    [..., pieces of all rows].
    """
    bit_bytes = partition.row_elements * bits // 8
    end = bit_bytes + partition.piece_lengths.shape[1] * dtype.itemsize
    scales = payload[..., bit_bytes:end].clone(memory_format=torch.contiguous_format).view(dtype)
    return payload[..., :bit_bytes].flatten(-2), scales.flatten(-2)


def join_payload(partition: Partition, bits: Tensor, scales: Tensor) -> Tensor:
    """Codes of all elements, uint8, and scales [groups] -> payload uint8 [rows, row_bytes]."""
    rows = bits.view(len(partition.piece_lengths), -1)
    tails = scales[partition.piece_groups].view(torch.uint8)
    length = rows.shape[1] + tails.shape[1]
    padding = round_up(length, ROW_ALIGNMENT) - length
    return torch.cat([rows, tails, tails.new_zeros(len(rows), padding)], dim=1)


def decode(
    partition: Partition, payload: Tensor, dtype: torch.dtype, factors: Numbers | None = None
) -> Tensor:
    """payload -> its vector, T [n]: +scale or -scale where active, else 0.

    factors: one for each group, by which its scales are multiplied first.
    """
    bits, scales = split_payload(partition, payload, dtype)
    if factors is not None:
        scales = scales * scales.new_tensor(factors)[partition.piece_groups.flatten()]
    signed = scaled_signs(bits, scales, partition.piece_lengths.flatten())
    return signed.masked_fill_(partition.inactive, 0)


def combine(
    partition: Partition,
    terms: Terms,
    dtype: torch.dtype,
    decode: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`terms` as a vector, T [n], 0 on padding.

    decode: payload of the momentum -> T [n]; only needed if there is momentum.
    """
    z = partition.zeros(dtype)
    momentum = decode(terms.momentum) if decode and terms.momentum is not None else None
    for i, (g, at) in enumerate(zip(terms.gradients, _slices(partition, terms.gradients))):
        if momentum is not None:
            z[at] = momentum[at] * terms.betas[i]
        if g is not None:
            z[at] += (g.to(dtype) * terms.weights[i]).flatten()
    return z if terms.path is None else _mean_momentum(partition, terms.path, z)


def _mean_momentum(partition: Partition, path: Path, g: Tensor) -> Tensor:
    """z of `Path`, in g's place."""
    numbers = zip(path.betas, path.rests, path.rates, path.totals)
    for (beta, rest, rate, total), at in zip(numbers, _slices(partition, [None] * len(path.betas))):
        m = path.momentum[at] * beta + g[at] * rest
        u = m * rate if path.accumulator is None else path.accumulator[at] + m * rate
        g[at] = u / total if total else m
    return g


# ---- sums


def block_sums(partition: Partition, x: Tensor, square: bool = True) -> Tensor:
    """The sum of squares of each block of x [n], or of x itself, float64 [blocks]."""
    rows = x.view(-1, ALIGNMENT)
    first = partition.blocks[:, Column.START] // ALIGNMENT
    count = partition.blocks[:, Column.LENGTH] // ALIGNMENT
    sums = torch.zeros(len(first), ALIGNMENT, dtype=torch.float64, device=x.device)
    for i in range(int(count.max())):
        longer = (count > i).nonzero().flatten()
        row = rows[first[longer] + i].double()
        sums[longer] += row * row if square else row
    return _over_lanes(sums)


def group_sums(partition: Partition, sums: Tensor) -> Tensor:
    """float64 [blocks] -> float64 [groups]."""
    blocks_of = torch.bincount(partition.blocks[:, Column.GROUP], minlength=len(partition.lengths))
    return sums_of_runs(sums, blocks_of)


def sums_of_runs(numbers: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each run of neighbouring numbers: float64 [n], int64 [runs] -> float64 [runs]."""
    starts = (lengths.cumsum(0) - lengths)[:, None]
    sums = torch.zeros(len(lengths), ALIGNMENT, dtype=torch.float64, device=numbers.device)
    lanes = torch.arange(ALIGNMENT, device=numbers.device)
    for first in range(0, int(lengths.max()), ALIGNMENT):
        longer = (lengths > first).nonzero().flatten()
        place = first + lanes
        row = numbers[(starts[longer] + place).clamp(max=len(numbers) - 1)]
        sums[longer] += torch.where(place < lengths[longer, None], row, 0)
    return _over_lanes(sums)


def _over_lanes(sums):
    """float64 [..., ALIGNMENT] -> float64 [...]."""
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def root_mean_squares(partition: Partition, sums: Tensor) -> Tensor:
    """float64 [blocks] -> float64 [groups], sqrt(sum / active elements)."""
    return square_root(group_sums(partition, sums) / partition.counts)


def square_root(x: Tensor) -> Tensor:
    """sqrt(x) rounded correctly, as IEEE 754 demands, which torch's own is not on every CPU."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


# ---- the kernels


def measure(partition: Partition, gradients: Tensors) -> Tensor:
    """What the ranks must know of their gradients before they step, float64 [2].

    The squared norm, masked elements included, and the number of masked elements that are not zero.
    On the partition's device.
    """
    g = combine(partition, Terms(gradients), dtype_of(gradients))
    masked = torch.count_nonzero(torch.where(partition.active, 0, g))
    sums = group_sums(partition, block_sums(partition, g))
    square = sums_of_runs(sums, torch.tensor([len(sums)], device=sums.device))[0]
    return torch.stack([square, masked.double()])


def compress(
    partition: Partition, terms: Terms, compensated: Tensor, scales: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """A worker's compression with a lazy error: kept as the vector c and the scales that were sent.

        e = c - scale * sign(c)         of the last call
        c = z + e, 0 where not active   written to `out`, which may be `compensated` itself
        scale = ||c||_2 / sqrt(count)   of each group

    Args:
        terms: of z.
        compensated: c of the last call, T [n].
        scales: those of the last call, T [groups]. Zeros say that `compensated` is e itself.
        out: T [n].

    Returns (payload uint8 [rows, row_bytes], new scales T [groups]).
    """
    dtype = compensated.dtype
    z = combine(partition, terms, dtype, lambda payload: decode(partition, payload, dtype))
    return _compress(partition, z, compensated, scales, out)


def average(
    partition: Partition, received: Tensor, compensated: Tensor, scales: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """A server's part: `compress` with z = sum_r decode(row r) / W, added in rank order.

    Each scale is divided by W before it is used.

    Args:
        partition: the server's, of one row.
        received: uint8 [W, row_bytes].
        compensated, out: T [chunk].
        scales: T [pieces].

    Returns (payload uint8 [1, row_bytes], new scales T [pieces]).
    """
    z = torch.zeros_like(compensated)
    for row in received:
        bits, row_scales = split_payload(partition, row[None], z.dtype)
        shares = row_scales / torch.full_like(row_scales, len(received))
        z += scaled_signs(bits, shares, partition.piece_lengths.flatten())
    return _compress(partition, z, compensated, scales, out)


def update(
    partition: Partition,
    parameters: Tensors,
    variance: Tensor,
    momentum: Tensor,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """x <- decay x - move, in place, where move = (step m) / (sqrt(v) + eps) within +-limit.

    The move is 0 where not active. One that is NaN stays NaN.

    Args:
        parameters: x of each tensor, rounded once at the end; None is left alone.
        variance: v, T [n].
        momentum: m as a payload, uint8 [rows, row_bytes].
        decays, steps, epsilons, limits: one for each tensor; infinity: no limit.

    Returns the number of elements whose move was beyond the limit, int64 [].
    """
    moves = decode(partition, momentum, variance.dtype, [*steps, 0.0])
    return apply_moves(partition, parameters, variance, moves, decays, epsilons, limits)


def apply_moves(
    partition: Partition,
    parameters: Tensors,
    variance: Tensor,
    moves: Tensor,
    decays: Numbers,
    epsilons: Numbers,
    limits: Numbers | None = None,
) -> Tensor:
    """x <- decay x - move / (sqrt(v) + eps), in place, with the moves T [n].

    What is subtracted is within +-limit; None: no limits. Returns the number of elements for which
    it would have been beyond, int64 [].
    """
    bounded = torch.zeros((), dtype=torch.int64, device=moves.device)
    for i, (x, at) in enumerate(zip(parameters, _slices(partition, parameters))):
        if x is not None:
            move = moves[at] / (square_root(variance[at]) + epsilons[i])
            move.masked_fill_(moves[at] == 0, 0)  # 0 / 0 where v and eps are 0
            if limits is not None and limits[i] < math.inf:
                bounded += bound(move, limits[i])
            x.copy_(x.to(variance.dtype) * decays[i] - move.view(x.shape))
    return bounded


def bound(move: Tensor, limit: float | Tensor) -> Tensor:
    """Bring T [...] into +-limit, in place, except for NaN.

    Returns the number of elements that were beyond, int64 [].
    """
    limit = torch.as_tensor(limit, dtype=move.dtype, device=move.device)
    beyond = torch.count_nonzero(move.abs() > limit)
    move.clamp_(-limit, limit)
    return beyond


def adam(
    partition: Partition,
    parameters: Tensors,
    gradient: Tensor,
    momentum: Tensor,
    variance: Tensor,
    beta1s: Numbers,
    beta2s: Numbers,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    roots: Numbers,
) -> None:
    """One step of Adam without compression, in place.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        x <- decay x - (step m) / (root sqrt(v) + eps)

    Args:
        parameters: x of each tensor, rounded once at the end; None is left alone.
        gradient, momentum, variance: T [n].
        beta1s, beta2s, decays, steps, epsilons, roots: one for each tensor.
    """
    for i, (x, at) in enumerate(zip(parameters, _slices(partition, parameters))):
        g, m, v = gradient[at], momentum[at], variance[at]
        m.mul_(beta1s[i]).add_(g * (1 - beta1s[i]))
        v.mul_(beta2s[i]).add_(g * g * (1 - beta2s[i]))
        if x is not None:
            move = m * steps[i] / (square_root(v) * roots[i] + epsilons[i])
            x.copy_(x.to(m.dtype) * decays[i] - move.view(x.shape))


def dtype_of(tensors: Tensors) -> torch.dtype:
    """T for these tensors: float64 if one of them is, else float32."""
    has_double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if has_double else torch.float32


def _compress(partition, z, compensated, scales, out):
    error = compensated - scaled_signs(pack_signs(compensated), scales, partition.lengths)
    out.copy_(torch.where(partition.active, z + error, 0))
    scales = root_mean_squares(partition, block_sums(partition, out)).to(out.dtype)
    return join_payload(partition, pack_signs(out), scales), scales


def _slices(partition, tensors):
    """Where each tensor lies in the flat vector; of one that is None, with its padding."""
    ends = partition.lengths.cumsum(0).tolist()
    starts = [0, *ends]
    return [
        slice(start, end if tensor is None else start + tensor.numel())
        for start, end, tensor in zip(starts, ends, tensors)
    ]


# ---- LAMB and 0/1 Adam: formulas, in plain torch on every device, whose tensors are T and whose
# ---- numbers are Python floats, or T [n / ALIGNMENT, 1] for vectors viewed as [n / ALIGNMENT,
# ---- ALIGNMENT]; and the kernels that are made of them, which only the CPU has compiled.


def lamb_moments(
    g: Tensor, m: Tensor, v: Tensor, beta1: Tensor, rest1: Tensor, beta2: Tensor, rest2: Tensor
) -> None:
    """m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, in place.

    "1-bit LAMB", equation 1; `rest1` is 1 - beta1, `rest2` is 1 - beta2.
    """
    m.mul_(beta1).add_(g * rest1)
    v.mul_(beta2).add_(g * g * rest2)


def lamb_direction(
    x: Tensor, m: Tensor, v: Tensor, c1: Tensor, root: Tensor, eps: Tensor, weight_decay: Tensor
) -> Tensor:
    """u = (m / c1) / (root sqrt(v) + eps) + weight_decay x ("1-bit LAMB", equation 1).

    root is 1 / sqrt(c2); c1 and c2 correct m and v for starting at zero.
    """
    return m / c1 / (square_root(v) * root + eps) + weight_decay * x


def lamb_move(m: Tensor, v: Tensor, rate: Tensor, root: Tensor, eps: Tensor) -> Tensor:
    """rate m / (root sqrt(v) + eps), where rate = lr c / c1: what `lamb_apply` subtracts."""
    return m * rate / (square_root(v) * root + eps)


def lamb_apply(x: Tensor, move: Tensor, decay: float) -> None:
    """x <- decay x - move, in place, rounded once to x's own type; decay = 1 - lr c weight_decay.

    Together with `lamb_move` x <- x - lr c u ("1-bit LAMB", equation 1; Algorithm 1, line 21).
    """
    x.copy_(x.to(move.dtype) * decay - move)


def lamb_fresh_variance(
    z: Tensor, m: Tensor, v_fresh: Tensor, scaling: Tensor, beta1: Tensor, beta2: Tensor
) -> None:
    """From the received z = scaling m_t: m <- m_t and v_fresh, in place; z becomes m_t.

    g = (m_t - beta1 m) / (1 - beta1)        v_fresh <- beta2 v_fresh + (1 - beta2) g^2

    "1-bit LAMB", Algorithm 1, the two lines before line 17. The numbers are T [rows, 1].
    """
    g = (z.div_(scaling) - beta1 * m) / (1 - beta1)
    v_fresh.mul_(beta2).add_((1 - beta2) * g * g)
    m.copy_(z)


def lamb_ratio(v: Tensor, v_fresh: Tensor, eps: Tensor, of: str) -> Tensor:
    """v / v_fresh, -inf where v is 0 ("1-bit LAMB", Algorithm 1, line 17).

    of = "root": (sqrt(v) + eps) / (sqrt(v_fresh) + eps), as in the authors' code.
    """
    if of == "variance":
        ratio = v / v_fresh
    else:
        ratio = (square_root(v) + eps) / (square_root(v_fresh) + eps)
    return torch.where(v > 0, ratio, -torch.inf)


def lamb_follow(
    partition: Partition,
    before: Tensor,
    after: Tensor,
    variance: Tensor,
    fresh: Tensor,
    beta1s: Numbers,
    beta2s: Numbers,
    epsilons: Numbers,
    of: str,
) -> Tensor:
    """`lamb_fresh_variance`, in place, and then the largest `lamb_ratio` of each tensor.

    Args:
        before, after: the momentum before this step and after it, as payloads.
        variance, fresh: v and v_fresh, T [n].
        beta1s, beta2s, epsilons: one for each tensor.
        of: see `lamb_ratio`.

    Returns T [groups], -inf for a group without an active element.
    """

    def rows(values: Numbers) -> Tensor:
        return per_block(variance.new_tensor([*values, 0.0]), partition.lengths)

    m, z, v, v_fresh = (
        x.view(-1, ALIGNMENT)
        for x in (
            decode(partition, before, variance.dtype),
            decode(partition, after, variance.dtype),
            variance,
            fresh,
        )
    )
    lamb_fresh_variance(z, m, v_fresh, torch.ones_like(z[:, :1]), rows(beta1s), rows(beta2s))
    largest = lamb_ratio(v, v_fresh, rows(epsilons), of).amax(1)
    return torch.segment_reduce(largest, "max", lengths=partition.lengths // ALIGNMENT)


def zero_one_variance(v: Tensor, g: Tensor, beta2: float) -> None:
    """v <- beta2 v + (1 - beta2) g^2, in place, in a step of T_v with the mean gradient g."""
    v.copy_(beta2 * v + (1 - beta2) * g**2)


def zero_one_momentum(m: Tensor, g: Tensor, v: Tensor, beta1: float) -> None:
    """m <- beta1 m + (1 - beta1) g where v > 0, in place; g is 0 elsewhere from then on."""
    g.mul_(v > 0)
    m.mul_(beta1).add_(g * (1 - beta1))


def zero_one_accumulate(u: Tensor, m: Tensor, rate: float) -> None:
    """u <- u + rate m, in place."""
    u.add_(m * rate)


def zero_one_local(
    partition: Partition,
    parameters: Tensors,
    gradients: Tensors,
    momentum: Tensor,
    accumulator: Tensor,
    variance: Tensor,
    anchor: Tensor | None,
    factor: float,
    only_finite: bool,
    beta1s: Numbers,
    rates: Numbers,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """A step of 0/1 Adam that sends nothing, in place.

        g = factor g where v > 0 and, if `only_finite`, it is finite, else 0
        m <- beta1 m + (1 - beta1) g        u <- u + rate m
        x <- decay x - move, where move = (step m) / (sqrt(v) + eps) within +-limit, 0 where m is

    Args:
        parameters: x of each tensor, rounded once at the end; None is left alone.
        gradients: g of each tensor; None counts as zero.
        momentum, accumulator, variance: m, u and v, T [n].
        anchor: T [n], where x is kept first; None: it is not.
        beta1s, rates, decays, steps, epsilons, limits: one for each tensor; infinity: no limit.

    Returns the number of elements whose move was beyond the limit, int64 [].
    """
    g = combine(partition, Terms(gradients, [factor] * len(gradients)), variance.dtype)
    if only_finite:
        g.masked_fill_(~g.isfinite(), 0)
    moves = torch.empty_like(momentum)
    for i, at in enumerate(_slices(partition, [None] * len(gradients))):
        zero_one_momentum(momentum[at], g[at], variance[at], beta1s[i])
        zero_one_accumulate(accumulator[at], momentum[at], rates[i])
        moves[at] = momentum[at] * steps[i]
    for x, at in zip(parameters, _slices(partition, parameters)):
        if x is not None and anchor is not None:
            anchor[at].view(x.shape).copy_(x)
    return apply_moves(partition, parameters, variance, moves, decays, epsilons, limits)


def zero_one_sync(
    partition: Partition,
    parameters: Tensors,
    variance: Tensor,
    payload: Tensor,
    momentum: Tensor,
    anchor: Tensor | None,
    decays: Numbers,
    steps: Numbers,
    epsilons: Numbers,
    limits: Numbers,
) -> Tensor:
    """`update` from the parameters at the last sync, after which the momentum is a vector again.

    Args:
        payload: the momentum that all ranks have received, uint8 [rows, row_bytes].
        momentum: T [n], where it is written.
        anchor: x at the last sync, T [n]; None: they are the parameters as they are.
        the others, and the result: as `update`'s.
    """
    momentum.copy_(decode(partition, payload, variance.dtype))
    for x, at in zip(parameters, _slices(partition, parameters)):
        if x is not None and anchor is not None:
            x.copy_(anchor[at].view(x.shape))
    numbers = decays, steps, epsilons, limits
    return update(partition, parameters, variance, payload, *numbers)
