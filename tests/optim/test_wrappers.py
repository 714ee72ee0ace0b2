"""Optimizers inside other libraries' wrappers."""

import pytest
import torch
from helpers.optimizer_kinds import KINDS
from helpers.small_runs import everything, make, same, saved, step

import onebit
from onebit.comm import Single, run_threads

TRAIN_APART = [
    (onebit.ZeroOneAdam, {"variance_freeze_step": 4, "local_step_scaler": 2}),
    (onebit.LocalSGD, {"tau": 3}),
]


class CopyOfAttributes:
    """What Lightning's and Fabric's optimizers do: copy the attributes, and join the class."""

    def __init__(self, optimizer):
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
        kind = type(optimizer)
        self.__class__ = type(kind.__name__, (CopyOfAttributes, kind), {})
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.report("F07")
@pytest.mark.parametrize("kind, options", KINDS + TRAIN_APART)
def test_a_wrapper_that_copies_the_attributes_never_parts_from_the_optimizer(kind, options):
    """Training, synchronize() and what is saved through it equal those without it."""

    def run(communicator, wrap):
        run = make(communicator, kind, **options)
        wrapped = wrap(run.optimizer)
        for t in range(12):
            step(run, t, communicator.rank)
            if t == 7:
                wrapped.synchronize()
                run.optimizer.load_state_dict(saved(wrapped))
        assert wrapped.last_step_skipped == run.optimizer.last_step_skipped
        return everything(run)

    def through(wrap):
        return run_threads(2, lambda communicator: run(communicator, wrap))

    for alone, wrapped in zip(through(lambda o: o), through(CopyOfAttributes), strict=True):
        assert same(alone, wrapped)


@pytest.mark.report("F07")
def test_accelerates_wrapper_trains_and_saves_as_the_optimizer_alone():
    accelerate = pytest.importorskip("accelerate")
    results = []
    for wrap in (lambda o: o, accelerate.Accelerator(cpu=True).prepare_optimizer):
        run = make(Single(), warmup=4)
        wrapped = wrap(run.optimizer)
        for t in range(9):
            for i, p in enumerate(run.params):
                p.grad = torch.full(p.shape, 0.1 * (t + 1 - i))
            wrapped.step()
            wrapped.zero_grad()
            if t == 5:
                wrapped.load_state_dict(wrapped.state_dict())
        results.append(everything(run))
    assert same(*results)
