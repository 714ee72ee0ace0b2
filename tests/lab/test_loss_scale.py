"""The loss scale of half precision."""

import math

import torch

from onebit.lab.training.precision import LossScale


def test_the_loss_scale_halves_after_an_overflow_and_doubles_after_patience():
    scale = LossScale("fp16", patience=2)
    scale.update(skipped=True)
    assert scale.value == 2.0**15
    scale.update(skipped=False)
    scale.update(skipped=False)
    assert scale.value == 2.0**16
    other = LossScale("fp16", patience=2)
    other.load_state_dict(scale.state_dict())
    assert other.value == scale.value
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([2.0**16, math.inf])
    scale.unscale([p, torch.nn.Parameter(torch.ones(1))])
    assert p.grad.tolist() == [1.0, math.inf]
    scale = LossScale("fp32")
    scale.update(skipped=True)
    assert scale.value == 1 and not scale.can_shrink
