"""The order in which the kernels add, written out in Python floats."""

import torch

from onebit.layout import ALIGNMENT

# of runs of neighbouring numbers
LENGTHS = ([0, 5, 0], [63, 64, 65], [1, 128, 0, 1000], [2000])


def numbers_to_add(n):
    """Numbers of many magnitudes, float64 [n], so that the order of their sum shows in its bits."""
    generator = torch.Generator().manual_seed(n)
    exponents = 6 * torch.rand(n, generator=generator, dtype=torch.float64) - 3
    return torch.randn(n, generator=generator, dtype=torch.float64) * 10**exponents


def in_lanes(numbers):
    """Lane j adds numbers j, j + 64, ...; then the left half is added to the right half."""
    lanes = [0.0] * ALIGNMENT
    for i, number in enumerate(numbers):
        lanes[i % ALIGNMENT] += number
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [left + right for left, right in zip(lanes[:half], lanes[half:])]
    return lanes[0]
