"""broadcast_parameters makes the ranks alike, and raises on all of them if their models differ."""

import pytest
import torch
from helpers.small_runs import same

import onebit
from onebit.comm import run_threads


def test_broadcast_parameters_makes_differing_ranks_train():
    def run(communicator):
        generator = torch.Generator().manual_seed(communicator.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 10)
        onebit.broadcast_parameters(model, communicator)
        optimizer = onebit.OneBitAdam(model.named_parameters(), warmup=3, communicator=communicator)
        optimizer.step()
        return [t.clone() for t in model.state_dict().values()]

    results = run_threads(3, run)
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_broadcasting_differing_models_raises_on_all_ranks():
    def run(communicator):
        model = torch.nn.Linear(3, 4 + communicator.rank)
        with pytest.raises(RuntimeError, match="rank 1 has weight: shape .5, 3."):
            onebit.broadcast_parameters(model, communicator)
        return True

    assert run_threads(2, run) == [True, True]


def test_ranks_of_which_one_is_compiled_are_told_apart_by_their_parameters_own_names():
    def run(communicator):
        model = torch.nn.Linear(3, 4 + communicator.rank)
        model = torch.compile(model, backend="eager") if communicator.rank else model
        with pytest.raises(RuntimeError, match="rank 0 has weight: .*; rank 1 has weight: "):
            onebit.broadcast_parameters(model, communicator)
        return True

    assert run_threads(2, run) == [True, True]
