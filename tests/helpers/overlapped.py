"""`Net` with an optimizer that sends small buckets."""

import onebit
from helpers.nets import Net

OVERLAP_KINDS = [
    (onebit.OneBitAdam, {"warmup": 6}),
    (onebit.NaiveOneBitAdam, {}),
    (onebit.DistributedAdam, {}),
    (onebit.OneBitLamb, {"warmup": 6, "coefficient_beta": 0.8, "scale": "fused"}),
    (onebit.DistributedSGD, {"momentum": 0.9}),
    (onebit.DoubleSqueeze, {"weight_decay": 0.1}),
    (onebit.EFMomentumSGD, {"weight_decay": 0.1}),
]
SMALL = 0.001  # MB: a bucket for nearly every parameter of `Net`


def make_net(communicator, kind=onebit.OneBitAdam, compress=True, **options):
    model = Net()
    groups = [
        {"params": model.layers.parameters(), "lr": 1e-2},
        {"params": model.sometimes.parameters(), "lr": 1e-3, "compress": compress},
    ]
    return model, kind(groups, communicator=communicator, **options)
