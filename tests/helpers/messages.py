"""Random bytes and numbers for the ranks to send."""

import torch


def message(rank, rows, k):
    """Random bytes [rows, k], not contiguous."""
    generator = torch.Generator().manual_seed(1000 * rank + k)
    return torch.randint(256, (k, rows), generator=generator, dtype=torch.uint8).t()


def numbers(rank, n, dtype):
    """Numbers of many magnitudes, so that the order of a sum shows in its bits.

    A tenth are subnormal in float16.
    """
    generator = torch.Generator().manual_seed(2000 * rank + n)
    exponents = torch.linspace(-7, 3, n, dtype=torch.float64)[
        torch.randperm(n, generator=generator)
    ]
    return (torch.randn(n, generator=generator, dtype=torch.float64) * 10**exponents).to(dtype)
