"""One bit moves every coordinate of a tensor by the same momentum, so that one with a tiny variance, such as a rare word's, runs away."""

import torch

from onebit.kernels.torch_ops import per_block
from onebit.layout import ALIGNMENT

# Learning rates. Adam's own steps are at most (1 - beta1) / sqrt(1 - beta2) of them, 3.2 at its defaults (Kingma and Ba, section 2.1).
LARGEST_STEP = 100


def raise_to_floor(part, fraction):
    """v <- max(v, fraction * mean of its tensor), in place."""
    means = part.tensor_sums(part.variance) / _numels(part)
    floor = per_block((fraction * means).to(part.dtype), part.layout.lengths)
    part.variance.copy_(
        torch.where(
            part.layout.real, torch.maximum(part.variance.view(-1, ALIGNMENT), floor).flatten(), 0
        )
    )


def large_steps(part, eps, correction=1.0):
    """How many active coordinates a compressed momentum moves by more than LARGEST_STEP learning rates, under v / correction."""
    scales = (part.tensor_sums(part.momentum, square=True) / _numels(part)).sqrt()
    steps = per_block(scales, part.layout.lengths) / (
        (part.variance.view(-1, ALIGNMENT) / correction).sqrt() + eps
    )
    return int(((steps > LARGEST_STEP) & part.partition.active.view(-1, ALIGNMENT)).sum())


def small_variance(large):
    """The warning."""
    return (
        f"{large} coordinates had so little gradient while the variance was taken that each compressed step can move them by more than "
        f"{LARGEST_STEP} learning rates: set variance_floor, 1e-3 say, which raises their variance to that fraction of their tensor's mean, or "
        "put their tensor in a group with compress=False"
    )


def _numels(part):
    """Elements of each tensor, at least 1; last the tail."""
    return torch.tensor([*part.layout.numels, 0], dtype=torch.float64, device=part.device).clamp(
        min=1
    )
