"""Rounds of the compressed allreduce on random vectors of odd shapes."""

import torch

from onebit.allreduce import CompressedAllreduce
from onebit.compression import Sign
from onebit.layout import Layout

ODD_SHAPES = [(1,), (2,), (7,), (8,), (9, 7), (64,), (65,), (0,), (), (1000,)]


def make(communicator, shapes, dtype=torch.float64, compressor=Sign, active=None):
    layout = Layout(shapes, communicator.size)
    return layout, CompressedAllreduce(communicator, layout, dtype, compressor, active)


def flatten(layout, tensors, dtype):
    flat = torch.zeros(layout.size, dtype=dtype)
    for view, tensor in zip(layout.views(flat), tensors):
        view.copy_(tensor)
    return flat


def rounds(communicator, shapes, count, dtype=torch.float64, compressor=Sign, active=None):
    """(sum of inputs, sum of outputs, worker error, server error) of this rank after `count`
    random rounds, and the last output.
    """
    layout, compressed = make(communicator, shapes, dtype, compressor, active)
    generator = torch.Generator().manual_seed(communicator.rank)
    total_in, total_out = (torch.zeros(layout.size, dtype=dtype) for _ in range(2))
    for _ in range(count):
        z = flatten(
            layout,
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes],
            dtype,
        )
        output = compressed.allreduce(z)
        total_in += torch.where(compressed.partition.active, z, 0)
        total_out += output
    return total_in, total_out, compressed.worker_error, compressed.server_error, output
