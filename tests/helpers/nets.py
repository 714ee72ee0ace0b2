"""A small network with a layer that is not always used, and its backward pass on random inputs."""

import torch

from helpers.small_runs import Run, everything


class Net(torch.nn.Module):
    """Several layers, one of which is not always used."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(17, 17) for _ in range(5))
        self.sometimes = torch.nn.Linear(17, 17)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 4)

    def forward(self, x, use_all=True):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.sometimes(x) if use_all else x


def backward(model, t, rank, scale=1.0, **options):
    x = scale * torch.randn(8, 17, generator=torch.Generator().manual_seed(100 * t + rank))
    (model(x, **options) - 1).square().mean().backward()


def state_of(model, optimizer):
    """All that a step may change, copied."""
    return everything(Run(list(model.parameters()), optimizer))
