"""Every compressor of the package with its options, and vectors to compress."""

from functools import partial
from itertools import filterfalse

import pytest
import torch

from helpers.cases import more
from onebit import compression
from onebit.layout import Layout

COMPRESSED_SHAPES = [
    (1,),
    (7,),
    (9, 7),
    (64,),
    (0,),
    (),
    (65,),
    (1000,),
    (2, 300),
]  # with 3 ranks the chunks' edges cut the last two
BITS = (2, 4, 8, 16)
OPTIONS = {
    "Quantize": [
        {"bits": bits, "norm": norm, "stochastic": stochastic}
        for bits in BITS
        for norm in ("max", "l2")
        for stochastic in (False, True)
    ],
    "TopK": [{"density": density} for density in (0.001, 0.05, 0.5, 1.0)],
}


def registered():
    """Every compressor of the package, with its defaults and with the options above."""
    for name in compression.__all__:
        kind = getattr(compression, name)
        if kind is not compression.Compressor:
            yield kind
            yield from (partial(kind, **options) for options in OPTIONS.get(name, ()))


def named(compressor):
    return (
        " ".join([compressor.func.__name__, *map(str, compressor.keywords.values())])
        if isinstance(compressor, partial)
        else compressor.__name__
    )


# Of Quantize the fewest and the most bits, each norm and rounding once; the others are `more`.
FIRST = {
    "Quantize": ["2 max False", "16 l2 True"],
    "TopK": ["0.05"],
}


def comes_first(compressor):
    kind, *options = named(compressor).split(" ", 1)
    return not options or options[0] in FIRST.get(kind, options)


every_compressor = pytest.mark.parametrize(
    "compressor",
    [*filter(comes_first, registered()), *more(*filterfalse(comes_first, registered()))],
    ids=named,
)


def masked(layout):
    """A mask that also empties a whole tensor."""
    active = layout.real & (torch.arange(layout.size) % 5 > 0)
    layout.views(active)[3].fill_(False)
    return active


def partitions(ranks, active=None):
    """(partition, the part of the vector that is its), of the worker and of each server."""
    layout = Layout(COMPRESSED_SHAPES, ranks)
    worker = layout.worker_partition(active)
    return [
        (worker, slice(None)),
        *((layout.server_partition(rank, worker), layout.chunk_of(rank)) for rank in range(ranks)),
    ]


def drawing(seed=0):
    return torch.Generator().manual_seed(seed)


def lone(x, kind, **options):
    """C[x] of one tensor."""
    layout = Layout([(len(x),)], 1)
    flat = torch.zeros(layout.size, dtype=torch.float64)
    flat[: len(x)] = torch.tensor(x, dtype=torch.float64)
    made = kind(layout.worker_partition(), torch.float64, **options)
    return made, flat, made.decompress(made.compress(flat))[: len(x)].tolist()
