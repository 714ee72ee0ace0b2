"""What the ranks must agree on before anything is changed: the same parameters, one clipping factor, one decision to skip."""

import hashlib
import math
import struct
import zlib
from typing import NamedTuple

import torch

from onebit.optim.options import has_sparse_gradient

_MESSAGE = struct.Struct(
    "<dII"
)  # 16 bytes: squared norm of the local gradients, late gradients, digest of the options
_MOST = 2**32 - 1


class Agreement(NamedTuple):
    """What the ranks know of their gradients together."""

    squared_norm: (
        float  # mean over the ranks of the squared norm; not finite if any gradient is not
    )
    late: int  # elements, over all ranks, with a gradient where the variance was zero at the freeze
    same_options: bool  # whether all ranks are about to take the same step
    same_norm: bool  # whether several ranks have gradients of exactly the same norm


def to_bytes(data, device):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def gather_bytes(communicator, data, device):
    """Every rank's `data`, byte strings of one length, in rank order."""
    return [bytes(row.tolist()) for row in communicator.all_gather(to_bytes(data, device))]


def agree(communicator, squared_norm, late, options, device):
    """One all_gather of 16 bytes; sums in rank order, so that every rank gets the same bits.

    Args:
        squared_norm: of this rank's gradients.
        late: this rank's count of gradients where there is no variance.
        options: text of what all ranks must have in common at this step.
    """
    message = _MESSAGE.pack(squared_norm, min(late, _MOST), zlib.crc32(options.encode()))
    rows = gather_bytes(communicator, message, device)
    norms, counts, digests = zip(*map(_MESSAGE.unpack, rows), strict=True)
    return Agreement(
        sum(norms) / len(norms),
        sum(counts),
        len(set(digests)) == 1,
        len(norms) > 1 and norms[0] > 0 and len(set(norms)) == 1,
    )


def describe_options(group, names):
    """These options of a parameter group as text, the same on ranks that have the same."""
    return ", ".join(f"{name}={group[name]}" for name in names)


def clip_factor(norm_squared, max_grad_norm):
    """min(1, max_grad_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; None if the norm is not finite."""
    if not math.isfinite(norm_squared):
        return None
    return (
        1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (math.sqrt(norm_squared) + 1e-6))
    )


def checksum(tensor):
    """CRC-32 of a tensor's bytes, row-major."""
    flat = tensor.detach().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else 0


def describe_parameters(groups, options, names, shared):
    """For each parameter all that the ranks must have in common before they compute with it, as text.

    Args:
        groups: parameter groups. options: the names of theirs that count. names: of all parameters, in order.
        shared: parameter -> its tensors that are the same on all ranks, by name.
    """
    names = iter(names)
    for group in groups:
        described = describe_options(group, options)
        for p in group["params"]:
            sparse = ", a sparse gradient" if has_sparse_gradient(p) else ""
            checksums = ", ".join(
                f"{name} {checksum(tensor):08x}" for name, tensor in shared[p].items()
            )
            yield f"{next(names)}: shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}, {described}{sparse}, checksums: {checksums}"


def check_same_on_all_ranks(communicator, lines, device, remedy):
    """Raise RuntimeError on all ranks, naming the first difference, unless all ranks give the same `lines` of text."""
    text = "\n".join(lines).encode()
    if len(set(gather_bytes(communicator, hashlib.sha256(text).digest(), device))) == 1:
        return
    lengths = [
        struct.unpack("<q", row)[0]
        for row in gather_bytes(communicator, struct.pack("<q", len(text)), device)
    ]
    padded = gather_bytes(communicator, text.ljust(max(lengths), b"\0"), device)
    texts = [row[:length].decode().split("\n") for row, length in zip(padded, lengths)]
    for rank, other in enumerate(texts):
        for i in range(max(len(texts[0]), len(other))):
            ours, theirs = (t[i] if i < len(t) else "nothing more" for t in (texts[0], other))
            if ours != theirs:
                raise RuntimeError(
                    f"the ranks differ: rank 0 has {ours}; rank {rank} has {theirs}. {remedy}"
                )
