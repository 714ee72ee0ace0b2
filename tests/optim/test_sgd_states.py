"""States that SGD's relatives take over from torch and from each other, or refuse."""

import pytest
import torch
from helpers.small_runs import SMALL_SHAPES, everything, make, same, saved, step

import onebit
from onebit.comm import Single


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_loading_torch_sgd_starts_from_its_momentum(momentum):
    """The next step is torch's; without momentum torch has no buffer, or None by that name, and
    ours starts from zero.
    """
    params = [torch.nn.Parameter(torch.ones(s)) for s in SMALL_SHAPES]
    sgd = torch.optim.SGD(params, lr=0.3, momentum=momentum)
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    sgd.step()
    run = make(Single(), onebit.DistributedSGD, shapes=SMALL_SHAPES)
    state = sgd.state_dict()
    if not momentum:
        state["state"] = {i: {"momentum_buffer": None} for i in range(len(params))}
    run.optimizer.load_state_dict(state)
    assert (
        run.optimizer.param_groups[0]["momentum"] == momentum
        and "nesterov" not in run.optimizer.param_groups[0]
    )
    with torch.no_grad():
        for p, q in zip(run.params, params):
            p.copy_(q)
            p.grad = q.grad.clone()
    sgd.step()
    run.optimizer.step()
    for p, q in zip(run.params, params):
        torch.testing.assert_close(p, q)


def test_a_state_of_another_kind_is_refused_with_the_remedy():
    params = [torch.nn.Parameter(torch.ones(s)) for s in SMALL_SHAPES]
    for p in params:
        p.grad = torch.ones_like(p)
    adam, sgd, nesterov = (
        torch.optim.Adam(params),
        torch.optim.SGD(params, momentum=0.9),
        torch.optim.SGD(params, momentum=0.9, nesterov=True),
    )
    for optimizer in (adam, sgd, nesterov):
        optimizer.step()
    for kind, optimizer, message in (
        (onebit.DistributedSGD, adam, "exp_avg.*Load it into"),
        (onebit.DistributedAdam, sgd, "momentum_buffer.*Load it into"),
        (onebit.DoubleSqueeze, sgd, "momentum_buffer.*Load it into"),
        (onebit.DistributedSGD, nesterov, "nesterov=False"),
    ):
        run = make(Single(), kind, shapes=SMALL_SHAPES)
        before = everything(run)
        with pytest.raises(ValueError, match=message):
            run.optimizer.load_state_dict(optimizer.state_dict())
        assert same(before, everything(run))


@pytest.mark.parametrize("kind", [onebit.DistributedSGD, onebit.LocalSGD])
def test_errors_of_another_kind_are_refused_or_reset(kind):
    """Who does not compress has no use for them."""
    run = make(Single(), onebit.EFMomentumSGD, shapes=SMALL_SHAPES)
    for t in range(3):
        step(run, t, 0)
    other = make(Single(), kind, shapes=SMALL_SHAPES)
    with pytest.raises(ValueError, match="errors of EFMomentumSGD.*reset_errors=True"):
        other.optimizer.load_state_dict(saved(run.optimizer))
    with pytest.warns(UserWarning, match="is lost"):
        other.optimizer.load_state_dict(saved(run.optimizer), reset_errors=True)
    assert other.optimizer.steps == 3


@pytest.mark.parametrize("kind", [onebit.DistributedSGD, onebit.LocalSGD, onebit.EFMomentumSGD])
def test_a_state_without_momentum_is_not_taken_for_one_with_it(kind):
    run = make(Single(), onebit.DoubleSqueeze, shapes=SMALL_SHAPES)
    step(run, 0, 0)
    for reset_errors in (False, True):
        with pytest.raises(ValueError, match="lack momentum, dampening: it is another optimizer's"):
            make(Single(), kind, shapes=SMALL_SHAPES).optimizer.load_state_dict(
                saved(run.optimizer), reset_errors=reset_errors
            )
