"""`Net` with an optimizer that sends small buckets."""

import onebit
from helpers.nets import Net

SMALL = 0.001  # MB: a bucket for nearly every parameter of `Net`


def make_net(communicator, kind=onebit.OneBitAdam, compress=True, **options):
    model = Net()
    groups = [
        {"params": model.layers.parameters(), "lr": 1e-2},
        {"params": model.sometimes.parameters(), "lr": 1e-3, "compress": compress},
    ]
    return model, kind(groups, communicator=communicator, **options)
