"""Used as any optimizer of torch: closures, schedulers, torch.compile, groups with keys of the
user's own.
"""

import copy

import pytest
import torch
from helpers.launch import run_gloo
from helpers.nets import Net, backward, state_of
from helpers.small_runs import everything, make, same, step
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Single


@pytest.mark.report("R41")
def test_closures_and_schedulers():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = onebit.OneBitAdam([p], lr=0.1, warmup=5, communicator=Single())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t < 3 else 0.0)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(8):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert (
        losses[0] == 3.0 and losses[3] < losses[0] and losses[3] == losses[-1]
    )  # lr 0 from the fourth step on


def test_what_cannot_work_is_refused_with_the_remedy():
    run = make(Single(), warmup=5)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(run.optimizer)
    with pytest.raises(ValueError, match="no parameter"):
        onebit.DistributedAdam([{"params": []}])


@pytest.mark.report("R59")
def test_a_compiled_step_is_the_step():
    plain, compiled = (make(Single(), warmup=4) for _ in range(2))
    step_compiled = torch.compile(compiled.optimizer.step, backend="eager")
    for t in range(8):
        step(plain, t, 0)
        for p, q in zip(plain.params, compiled.params):
            q.grad = p.grad.clone()
        step_compiled()
        assert same(everything(plain), everything(compiled))


def test_groups_may_hold_keys_of_the_users_own():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = onebit.OneBitAdam([{"params": [p], "lr_scale": 0.5, "name": "head"}], warmup=3)
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


def compiled_and_plain(communicator, overlap, wrap):
    """The same model, run by the same backend or as it is.

    The parameters and all state after each of 8 steps.
    """
    histories = []
    for compiled in (True, False):
        torch.compiler.reset()
        model = Net()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(communicator.rank)
        net = torch.compile(model, backend="aot_eager") if compiled else model
        onebit.broadcast_parameters(net, communicator)
        optimizer = onebit.OneBitAdam(
            net.named_parameters(),
            warmup=3,
            overlap=overlap,
            bucket_cap_mb=0.001,
            communicator=communicator,
        )
        if wrap:
            ddp = DistributedDataParallel(model)
            net = torch.compile(ddp, backend="aot_eager") if compiled else ddp
            onebit.ddp.attach(net, optimizer)
        history = []
        for t in range(8):
            backward(net, t, communicator.rank)
            optimizer.step()
            optimizer.zero_grad()
            history.append((*state_of(model, optimizer), optimizer.phase))
        histories.append(history)
    for ours, theirs in zip(*histories):
        assert ours[-1] == theirs[-1] and same(ours[:-1], theirs[:-1])
    return histories[0][-1]


def compiled_everywhere(communicator):
    return [
        compiled_and_plain(communicator, overlap, wrap)
        for overlap, wrap in ((True, False), (False, True))
    ]


@pytest.mark.report("R59")
def test_a_compiled_model_trains_bit_for_bit_like_the_plain_one():
    """aot_eager traces the model and changes no arithmetic.

    With overlap, or within DistributedDataParallel.
    """
    first, second = run_gloo(2, compiled_everywhere)
    for ours, theirs in zip(first, second):
        assert ours[-1] == theirs[-1] == "compressed" and same(
            ours[:12], theirs[:12]
        )  # 12 parameters, then state
