"""The kernels' definition in plain torch, on any device. The compiled ones give the same bits.

A vector's elements are float32 or float64, called T here; numbers given as Python floats are rounded to T before use, and no
product is fused with a sum. `partition` is an `onebit.layout.Partition`; a payload is what `Sign` sends: rows of bits, element
8 i + j being bit j of byte i, then one scale for each piece of the row.

Sums add squares in float64 in one order, which depends on neither threads nor processor: in a block of BLOCK elements, lane j adds
elements j, j + ALIGNMENT, j + 2 ALIGNMENT, ... one after another; the lanes are added left half to right half until one is left;
a group's blocks are added one after another.
"""

from typing import NamedTuple

import numpy as np
import torch

from onebit.layout import ALIGNMENT, Column

_GATHER_BITS = 0x0102040810204080  # times 8 bytes of 0 or 1: their bits, first byte lowest, in the product's top byte
_SIGNS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).to(
    torch.int8
) * 2 - 1  # [256, 8]: a byte's 8 signs


class Terms(NamedTuple):
    """What is compressed: z = beta * momentum + weight * g, each tensor with its own numbers.

    Attributes:
        gradients: for each tensor g, of any floating dtype and strides, or None, which counts as zero.
        weights: for each tensor a float.
        momentum: payload uint8 [rows, row_bytes], or None: no such term.
        betas: for each tensor a float; unused without momentum.
    """

    gradients: list
    weights: list
    momentum: torch.Tensor | None = None
    betas: list = ()


# ---- bits and scales


def pack_signs(x):
    """float [n] -> uint8 [n / 8]: bit 1 where x >= 0, so that sign(0) = +1."""
    eight = (x >= 0).view(torch.int64)
    return ((eight * _GATHER_BITS) >> 56).to(torch.uint8)


def scaled_signs(bits, scales, lengths):
    """uint8 [..., n / 8], one scale per segment [..., segments] -> [..., n]: +scale or -scale."""
    signs = _SIGNS.to(bits.device, scales.dtype).index_select(0, bits.flatten().int())
    blocks = signs.view(*bits.shape[:-1], -1, ALIGNMENT)
    return blocks.mul_(per_block(scales, lengths)).flatten(-2)


def per_block(values, lengths):
    """One value per segment, [..., segments], for each ALIGNMENT elements: [..., n / ALIGNMENT, 1]."""
    return values.repeat_interleave(lengths // ALIGNMENT, dim=-1)[..., None]


def split_payload(partition, payload, dtype, bits=1):
    """uint8 [..., rows, row_bytes] -> `bits` an element uint8 [..., n bits / 8], scales [..., pieces of all rows]."""
    bit_bytes = partition.row_elements * bits // 8
    scales = payload[..., bit_bytes:].clone(memory_format=torch.contiguous_format).view(dtype)
    return payload[..., :bit_bytes].flatten(-2), scales.flatten(-2)


def join_payload(partition, bits, scales):
    """bits of all elements, uint8 [n / 8] or a multiple, scales [groups] -> payload uint8 [rows, row_bytes]."""
    rows = len(partition.piece_lengths)
    return torch.cat([bits.view(rows, -1), scales[partition.piece_groups].view(torch.uint8)], dim=1)


def decode(partition, payload, dtype, factors=None):
    """payload -> its vector, T [n]: +scale or -scale, 0 where not active; a group's scales times its factor, if given."""
    bits, scales = split_payload(partition, payload, dtype)
    if factors is not None:
        scales = scales * _tensor(factors, scales)[partition.piece_groups.flatten()]
    return torch.where(
        partition.active, scaled_signs(bits, scales, partition.piece_lengths.flatten()), 0
    )


def combine(partition, terms, dtype, decode):
    """`terms` as a vector, T [n], 0 on padding; `decode`: payload -> T [n]."""
    z = partition.zeros(dtype)
    momentum = None if terms.momentum is None else decode(terms.momentum)
    for i, (g, at) in enumerate(zip(terms.gradients, _slices(partition, terms.gradients))):
        if momentum is not None:
            z[at] = momentum[at] * terms.betas[i]
        if g is not None:
            z[at] += (g.to(dtype) * terms.weights[i]).flatten()
    return z


# ---- sums


def block_sums(partition, x, square=True):
    """The sum of squares of each block of x [n], or of x itself, float64 [blocks]."""
    rows = x.view(-1, ALIGNMENT)
    first, count = (
        partition.blocks[:, Column.START] // ALIGNMENT,
        partition.blocks[:, Column.LENGTH] // ALIGNMENT,
    )
    sums = torch.zeros(len(first), ALIGNMENT, dtype=torch.float64, device=x.device)
    for i in range(int(count.max())):
        longer = (count > i).nonzero().flatten()
        row = rows[first[longer] + i].double()
        sums[longer] += row * row if square else row
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def group_sums(partition, sums):
    """float64 [blocks] -> float64 [groups]. On the CPU, since a GPU would not add in order."""
    blocks_of = torch.bincount(
        partition.blocks[:, Column.GROUP].cpu(), minlength=len(partition.lengths)
    )
    return torch.segment_reduce(sums.cpu(), "sum", lengths=blocks_of).to(sums.device)


def root_mean_squares(partition, sums):
    """float64 [blocks] -> float64 [groups], sqrt(sum / active elements)."""
    return square_root(group_sums(partition, sums) / partition.counts)


def square_root(x):
    """Rounded as IEEE 754 wants it, which torch's own is not on every CPU."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


# ---- the kernels


def measure(partition, gradients):
    """The squared norm of the tensors `gradients`, masked elements included, and how many masked elements are not zero.

    The groups' sums are added one after another. float64 [2], on the partition's device.
    """
    g = combine(partition, Terms(gradients, [1.0] * len(gradients)), dtype_of(gradients), None)
    late = torch.count_nonzero(torch.where(partition.active, 0, g))
    sums = group_sums(partition, block_sums(partition, g)).cpu()
    square = torch.segment_reduce(sums, "sum", lengths=torch.tensor([len(sums)]))[0]
    return torch.stack([square.to(late.device), late.double()])


def compress(partition, terms, compensated, scales, out):
    """A worker's compression with a lazy error, which is kept as the compensated vector c and the scales that were sent:

        e = c - scale * sign(c)         of the last call
        c = z + e, 0 where not active   written to `out`, which may be `compensated` itself
        scale = ||c||_2 / sqrt(count)   of each group

    Args:
        terms: `Terms` of z.
        compensated, out: T [n]. scales: T [groups], those of the last call; 0 says that `compensated` is e itself.

    Returns (payload uint8 [rows, row_bytes], scales T [groups]).
    """
    z = combine(
        partition,
        terms,
        compensated.dtype,
        lambda payload: decode(partition, payload, compensated.dtype),
    )
    return _compress(partition, z, compensated, scales, out)


def average(partition, received, compensated, scales, out):
    """A server's part: `compress` with z = sum_r decode(row r) / W, added in rank order, each scale being divided by W first.

    Args:
        partition: the server's, of one row. received: uint8 [W, row_bytes].
        compensated, out: T [chunk]. scales: T [pieces].

    Returns (payload uint8 [1, row_bytes], scales T [pieces]).
    """
    z = torch.zeros_like(compensated)
    for row in received:
        bits, row_scales = split_payload(partition, row[None], z.dtype)
        z += scaled_signs(
            bits,
            row_scales / torch.full_like(row_scales, len(received)),
            partition.piece_lengths.flatten(),
        )
    return _compress(partition, z, compensated, scales, out)


def update(partition, parameters, variance, momentum, decays, steps, epss):
    """x <- decay x - (step m) / (sqrt(v) + eps), m being decoded from a payload; x <- decay x where not active. In place.

    Args:
        parameters: for each tensor x, of any floating dtype, rounded once at the end; or None, to leave it alone.
        variance: v, T [n]. momentum: payload uint8 [rows, row_bytes].
        decays, steps, epss: for each tensor a float.
    """
    apply_moves(
        partition,
        parameters,
        variance,
        decode(partition, momentum, variance.dtype, [*steps, 0.0]),
        decays,
        epss,
    )


def apply_moves(partition, parameters, variance, moves, decays, epss):
    """x <- decay x - move / (sqrt(v) + eps), in place; `moves`: T [n]."""
    for x, at, decay, eps in zip(parameters, _slices(partition, parameters), decays, epss):
        if x is not None:
            move = moves[at] / (square_root(variance[at]) + eps)
            move = torch.where(moves[at] == 0, 0, move).view(x.shape)  # 0 / 0 where v and eps are 0
            x.copy_(x.to(variance.dtype) * decay - move)


def adam(
    partition, parameters, gradient, momentum, variance, beta1s, beta2s, decays, steps, epss, roots
):
    """One step of Adam without compression, in place:

        m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2        x <- decay x - (step m) / (root sqrt(v) + eps)

    Args:
        parameters: for each tensor x, of any floating dtype, rounded once at the end; or None, to leave it alone.
        gradient, momentum, variance: T [n].
        beta1s, beta2s, decays, steps, epss, roots: for each tensor a float.
    """
    for i, (x, at) in enumerate(zip(parameters, _slices(partition, parameters))):
        g, m, v = gradient[at], momentum[at], variance[at]
        m.mul_(beta1s[i]).add_(g * (1 - beta1s[i]))
        v.mul_(beta2s[i]).add_(g * g * (1 - beta2s[i]))
        if x is not None:
            move = m * steps[i] / (square_root(v) * roots[i] + epss[i])
            x.copy_(x.to(m.dtype) * decays[i] - move.view(x.shape))


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


def dtype_of(tensors):
    return (
        torch.float64
        if any(t is not None and t.dtype == torch.float64 for t in tensors)
        else torch.float32
    )


def _tensor(values, like):
    return torch.tensor(values, dtype=like.dtype, device=like.device)


# ---- LAMB and 0/1 Adam, in plain torch on every device. Tensors are T; each number is a Python
# ---- float, or T [n / ALIGNMENT, 1] for vectors viewed as [n / ALIGNMENT, ALIGNMENT].


def lamb_moments(g, m, v, beta1, rest1, beta2, rest2):
    """m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, in place.

    "1-bit LAMB", equation 1; `rest1` is 1 - beta1, `rest2` is 1 - beta2.
    """
    m.mul_(beta1).add_(g * rest1)
    v.mul_(beta2).add_(g * g * rest2)


def lamb_direction(x, m, v, c1, root, eps, weight_decay):
    """u = (m / c1) / (root sqrt(v) + eps) + weight_decay x ("1-bit LAMB", equation 1).

    root is 1 / sqrt(c2); c1 and c2 correct m and v for starting at zero.
    """
    return m / c1 / (square_root(v) * root + eps) + weight_decay * x


def lamb_move(m, v, rate, root, eps):
    """rate m / (root sqrt(v) + eps), where rate = lr c / c1: what `lamb_apply` subtracts."""
    return m * rate / (square_root(v) * root + eps)


def lamb_apply(x, move, decay):
    """x <- decay x - move, in place, rounded once to x's own type; decay = 1 - lr c weight_decay.

    Together with `lamb_move` x <- x - lr c u ("1-bit LAMB", equation 1; Algorithm 1, line 21).
    """
    x.copy_(x.to(move.dtype) * decay - move)


def lamb_fresh_variance(z, m, v_fresh, scaling, beta1, beta2):
    """From the received z = scaling m_t: m <- m_t and v_fresh, in place; z becomes m_t.

    g = (m_t - beta1 m) / (1 - beta1)        v_fresh <- beta2 v_fresh + (1 - beta2) g^2

    "1-bit LAMB", Algorithm 1, the two lines before line 17. The numbers are T [rows, 1].
    """
    g = (z.div_(scaling) - beta1 * m) / (1 - beta1)
    v_fresh.mul_(beta2).add_((1 - beta2) * g * g)
    m.copy_(z)


def lamb_ratio(v, v_fresh, eps, of):
    """v / v_fresh, -inf where v is 0 ("1-bit LAMB", Algorithm 1, line 17).

    of = "root": (sqrt(v) + eps) / (sqrt(v_fresh) + eps), as in the authors' code.
    """
    if of == "variance":
        ratio = v / v_fresh
    else:
        ratio = (square_root(v) + eps) / (square_root(v_fresh) + eps)
    return torch.where(v > 0, ratio, -torch.inf)


def zero_one_variance(v, g, beta2):
    """v <- beta2 v + (1 - beta2) g^2, in place, in a step of T_v with the mean gradient g."""
    v.copy_(beta2 * v + (1 - beta2) * g**2)


def zero_one_momentum(m, g, v, beta1):
    """m <- beta1 m + (1 - beta1) g where v > 0, in place; g is 0 elsewhere from then on."""
    g.mul_(v > 0)
    m.mul_(beta1).add_(g * (1 - beta1))


def zero_one_accumulate(u, m, rate):
    """u <- u + rate m, in place."""
    u.add_(m * rate)


def zero_one_apply(partition, parameters, variance, direction, spans, decays, epsilons):
    """x <- decay x - rate direction / (root sqrt(v) + eps), in place.

    Args:
        parameters: for each tensor x, of any floating dtype, rounded once at the end; or None, to
            leave it alone.
        variance, direction: T [n].
        spans: [(slice of the vectors, rate / root), ...].
        decays: for each tensor its decay. epsilons: for each tensor eps / root.
    """
    moves = direction.clone()
    for span, rate in spans:
        moves[span] *= rate
    apply_moves(partition, parameters, variance, moves, decays, epsilons)
