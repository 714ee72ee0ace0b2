"""One of every optimizer, with options under which it synchronizes at every step."""

import onebit

KINDS = [
    (onebit.OneBitAdam, {"warmup": 4}),
    (onebit.NaiveOneBitAdam, {}),
    (onebit.DistributedAdam, {}),
    (onebit.ZeroOneAdam, {"variance_freeze_step": 4}),
    (onebit.Lamb, {}),
    (onebit.OneBitLamb, {"warmup": 4}),
    (onebit.DistributedSGD, {"momentum": 0.9}),
    (onebit.DoubleSqueeze, {}),
    (onebit.EFMomentumSGD, {}),
    (onebit.LocalSGD, {"tau": 1}),
    (onebit.LazyVarianceAdam, {}),
    (onebit.QuantizedVarianceAdam, {}),
]
