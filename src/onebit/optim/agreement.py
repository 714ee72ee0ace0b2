"""What the ranks must agree on before anything is changed.

They must hold the same parameters, clip by one factor, and take or skip a step together. A rank's
own GradScaler has its say in both.
"""

import hashlib
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from onebit.comm import Communicator
from onebit.optim.validation import describe_option, has_sparse_gradient

# 16 bytes: squared norm of the local gradients, masked gradient elements, digest of the options
_MESSAGE = struct.Struct("<dII")
_MOST = 2**32 - 1
# The names of parameters in the modules that `remember_names` has seen.
_NAMES = WeakTensorKeyDictionary()
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Agreement(NamedTuple):
    """What the ranks know of their gradients together.

    Attributes:
        squared_norm: the mean over the ranks of the squared norm; not finite if a gradient is not.
        masked: gradient elements, over all ranks, that are not zero where the mask is.
        same_options: whether all ranks are about to take the same step.
        same_norm: whether several ranks have gradients of exactly the same norm.
    """

    squared_norm: float
    masked: int
    same_options: bool
    same_norm: bool


def agree(
    communicator: Communicator,
    squared_norm: float,
    masked: int,
    options: str,
    device: torch.device,
) -> Agreement:
    """One all_gather of 16 bytes; sums go in rank order, so that every rank gets the same bits.

    Args:
        squared_norm: of this rank's gradients.
        masked: this rank's number of gradient elements that are not zero where the mask is.
        options: text of what all ranks must have in common at this step.
    """
    message = _MESSAGE.pack(squared_norm, min(masked, _MOST), zlib.crc32(options.encode()))
    rows = gather_bytes(communicator, message, device)
    norms, counts, digests = zip(*map(_MESSAGE.unpack, rows), strict=True)
    return Agreement(
        sum(norms) / len(norms),
        sum(counts),
        len(set(digests)) == 1,
        len(norms) > 1 and norms[0] > 0 and len(set(norms)) == 1,
    )


def gather_bytes(communicator: Communicator, data: bytes, device: torch.device) -> list[bytes]:
    """Every rank's `data`, byte strings of one length, in rank order."""
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    return [bytes(row.tolist()) for row in communicator.all_gather(sent)]


def ranks_with(
    communicator: Communicator, flags: Sequence[bool], options: str, device: torch.device
) -> tuple[list[bool], bool]:
    """(whether each flag is set on any rank, whether all ranks have the same `options`).

    One all_gather of a byte for each flag and 4 more.
    """
    digest = struct.pack("<I", zlib.crc32(options.encode()))
    rows = gather_bytes(communicator, bytes(flags) + digest, device)
    columns = zip(*(row[: len(flags)] for row in rows))
    return [any(column) for column in columns], len({row[len(flags) :] for row in rows}) == 1


# ---- one factor: clipping, and torch.amp.GradScaler


def clip_factor(norm_squared: float, max_grad_norm: float | None) -> float | None:
    """min(1, max_grad_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_.

    None if the norm is not finite.
    """
    if not math.isfinite(norm_squared):
        return None
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (math.sqrt(norm_squared) + 1e-6))


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler calls step(): it sets `found_inf`, and `grad_scale`, which is None after
    `unscale_`."""
    return hasattr(optimizer, "found_inf")


def unscaling(optimizer: torch.optim.Optimizer) -> float:
    """What this rank's gradients must be multiplied by before all else.

    That is 1 / scale of a GradScaler, 1 without one; NaN if the scaler has found an inf, so that
    whatever the ranks compute together tells all of them to skip.
    """
    if not is_scaled(optimizer):
        return 1.0
    if float(optimizer.found_inf):
        return math.nan
    return 1.0 if optimizer.grad_scale is None else 1 / float(optimizer.grad_scale)


def check_scaler_may_step(optimizer: torch.optim.Optimizer, overlap: bool) -> None:
    """Raise RuntimeError if a GradScaler calls step(), and gradients have left with its scale."""
    if overlap and is_scaled(optimizer):
        raise RuntimeError(
            "with overlap=True a bucket leaves during backward, when this rank's scale is still in "
            "it and torch.amp.GradScaler has not yet looked at it: make the optimizer with "
            "overlap=False, or use bfloat16, which needs no scaler"
        )


# ---- the same on all ranks


def describe_options(group: Mapping[str, Any], names: Iterable[str]) -> str:
    """These options of a parameter group as text, the same on ranks that have the same."""
    return "; ".join(f"{name}={canonical(group[name])}" for name in names)


def canonical(value: Any) -> Any:
    """An option such that equal ones have one text: 1, 1.0 and a tensor of 1 alike, and a list as
    a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(map(canonical, value))
    if torch.is_tensor(value) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each tensor, which changes with any one of its elements.

    On the CPU it is `checksum`. A GPU sums the elements, read as whole numbers, which is quicker
    there than to copy them; it does not see elements that have changed places.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [checksum(tensor) for tensor in tensors]
    words = (tensor.detach().view(_WHOLE[tensor.dtype.itemsize]) for tensor in tensors)
    sums = [word.sum(dtype=torch.int64) for word in words]
    return torch.stack([x.to(sums[0].device) for x in sums]).tolist()


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, row-major."""
    flat = tensor.detach().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else 0


def remember_names(module: torch.nn.Module) -> None:
    """From now on the ranks compare the names of this module's parameters as well.

    Norm weights and biases start alike, so that without names a rank which lists them in another
    order goes unnoticed.
    """
    _NAMES.update(dict((p, name) for name, p in module.named_parameters()))


def name_of(p: torch.Tensor) -> str | None:
    """The name of a parameter in its module, if `remember_names` has seen that."""
    return _NAMES.get(p)


def describe_parameters(
    groups: Iterable[Mapping[str, Any]],
    options: Sequence[str],
    names: Iterator[str],
    shared: Mapping[torch.Tensor, Mapping[str, torch.Tensor]],
) -> Iterator[str]:
    """For each parameter a line of all that the ranks must have in common before they compute.

    Args:
        groups: parameter groups.
        options: the names of their options that count.
        names: those of all parameters, in order.
        shared: parameter -> its tensors that are the same on all ranks, by name.
    """
    for group in groups:
        for p in group["params"]:
            yield line(
                next(names),
                f"shape {tuple(p.shape)}",
                str(p.dtype),
                f"requires_grad={p.requires_grad}",
                describe_options(group, options),
                "a sparse gradient" if has_sparse_gradient(p) else "a dense gradient",
                *(f"checksum of {name} {checksum(x):08x}" for name, x in shared[p].items()),
            )


def describe_optimizer(
    kind: str, steps: int, options: Mapping[str, Any], facts: Mapping[str, Any], scaled: bool
) -> str:
    """A line of what the optimizers of all ranks must have in common."""
    return line(
        kind,
        f"after {steps} steps",
        *(f"{name}={describe_option(canonical(x))}" for name, x in {**facts, **options}.items()),
        f"{'with' if scaled else 'without'} a GradScaler",
    )


def line(name: str, *facts: str) -> str:
    """Facts of something, as `check_same_on_all_ranks` takes them."""
    return f"{name}: {'; '.join(facts)}"


def check_same_on_all_ranks(
    communicator: Communicator, lines: Iterable[str], device: torch.device, remedy: str
) -> None:
    """Raise RuntimeError on all ranks unless all give the same `lines`, each made by `line`.

    The message tells of the first line that differs the facts that do, then the remedy.
    """
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
                    f"the ranks differ: rank 0 has {_only_what_differs(ours, theirs)}; rank {rank} "
                    f"has {_only_what_differs(theirs, ours)}. {remedy}"
                )


def _only_what_differs(ours: str, theirs: str) -> str:
    """`ours` without the facts that `theirs` has too."""
    (name, _, facts), (other, _, known) = (text.partition(": ") for text in (ours, theirs))
    own = [fact for fact in facts.split("; ") if name != other or fact not in known.split("; ")]
    return f"{name}: {', '.join(own)}" if facts and own else name
