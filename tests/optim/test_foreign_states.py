"""States of torch's own optimizers, and of other kinds of ours: taken over exactly, or refused
before anything is lost.
"""

import warnings

import pytest
import torch
from helpers.cases import holds_for_each, more
from helpers.small_runs import SMALL_SHAPES, everything, make, same, step, torch_state

import onebit
from onebit.comm import Single, run_threads


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("step_as", [torch.tensor, float, int])
def test_adams_state_is_taken_over_however_its_step_is_kept(kind, step_as):
    state = torch_state(kind)
    for entries in state["state"].values():
        entries["step"] = step_as(float(entries["step"]))
    run = make(Single(), warmup=10)
    run.optimizer.load_state_dict(state)
    assert (
        run.optimizer.steps == 3
        and run.optimizer.phase == "warmup"
        and run.optimizer.param_groups[0]["lr"] == 0.3
    )
    for i, p in enumerate(run.params):
        assert all(
            torch.equal(run.optimizer.state[p][name], state["state"][i][name])
            for name in ("exp_avg", "exp_avg_sq")
        )


def test_a_parameter_without_state_starts_from_zero():
    state = torch_state(torch.optim.AdamW)
    del state["state"][0]
    run = make(Single(), warmup=10)
    run.optimizer.load_state_dict(state)
    assert (
        not run.optimizer.state[run.params[0]]["exp_avg"].any()
        and run.optimizer.state[run.params[1]]["exp_avg"].any()
    )


@holds_for_each(
    [
        (
            torch.optim.SGD,
            {"momentum": 0.9},
            "momentum_buffer for a parameter, and lacks exp_avg, exp_avg_sq",
        ),
        (torch.optim.RMSprop, {}, "lacks exp_avg"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True"),
    ]
)
def test_another_optimizers_state_is_refused_before_anything_is_lost(kind, options, message):
    run = make(Single(), warmup=10)
    step(run, 0, 0)
    before = everything(run)
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(torch_state(kind, **options))
    assert (
        same(before, everything(run))
        and run.optimizer.steps == 1
        and run.optimizer.param_groups[0]["lr"] == 1e-3
    )


def test_adams_coupled_weight_decay_is_warned_of():
    run = make(Single(), warmup=10)
    with pytest.warns(UserWarning, match="decoupled"):
        run.optimizer.load_state_dict(torch_state(torch.optim.Adam, weight_decay=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (torch.optim.Adam, torch.optim.AdamW):
            run.optimizer.load_state_dict(
                torch_state(kind, weight_decay=0.1 if kind is torch.optim.AdamW else 0.0)
            )


def test_loading_torch_adamw_starts_from_its_moments():
    params = [torch.nn.Parameter(torch.ones(s)) for s in SMALL_SHAPES]
    adamw = torch.optim.AdamW(params, lr=0.3)
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    adamw.step()
    run = make(Single(), shapes=SMALL_SHAPES, warmup=10)
    run.optimizer.load_state_dict(adamw.state_dict())
    assert (
        run.optimizer.steps == 1
        and run.optimizer.param_groups[0]["lr"] == 0.3
        and "amsgrad" not in run.optimizer.param_groups[0]
    )
    torch.testing.assert_close(
        run.optimizer.state[run.params[0]]["exp_avg"], adamw.state[params[0]]["exp_avg"]
    )
    with torch.no_grad():
        for p, q in zip(run.params, params):
            p.copy_(q)
            p.grad = q.grad.clone()
    adamw.param_groups[0]["weight_decay"] = run.optimizer.param_groups[0]["weight_decay"]
    adamw.step()
    run.optimizer.step()
    for p, q in zip(run.params, params):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("steps", [0, 1, 4, *more(2, 3, 5, 6)])
def test_a_foreign_state_is_taken_over_the_same_wherever_zero_one_adam_was(steps):
    """Between two syncs, too: what had been accumulated is no more, and the parameters stay
    where they are.
    """
    options = {"variance_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 8}
    used, fresh = (make(Single(), onebit.ZeroOneAdam, **options) for _ in range(2))
    for t in range(steps):
        step(used, t, 0)
    for run in (used, fresh):
        with torch.no_grad():
            for p in run.params:
                p.fill_(3.0)
        run.optimizer.load_state_dict(torch_state(torch.optim.AdamW))
        for t in range(10, 26):
            step(run, t, 0)
    assert same(everything(used), everything(fresh))


@pytest.mark.parametrize(
    "kind, options, into, message",
    [
        (torch.optim.SGD, {}, onebit.DistributedAdam, "lack betas, eps"),
        (torch.optim.RMSprop, {"momentum": 0.9}, onebit.DistributedSGD, "lack dampening"),
    ],
)
def test_groups_of_another_optimizer_are_refused(kind, options, into, message):
    run = make(Single(), into)
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(torch_state(kind, **options))
    assert run.optimizer.param_groups[0]["lr"] != 0.3


def test_moments_without_a_step_are_refused():
    state = torch_state(torch.optim.AdamW)
    for entries in state["state"].values():
        del entries["step"]
    with pytest.raises(ValueError, match="of how many steps"):
        make(Single(), onebit.DistributedAdam).optimizer.load_state_dict(state)


def test_a_state_between_two_syncs_is_no_other_kinds():
    def run(communicator):
        local = make(communicator, onebit.LocalSGD, tau=4, momentum=0.9)
        step(local, 0, communicator.rank)
        with pytest.raises(ValueError, match="between two syncs"):
            make(communicator, onebit.DistributedSGD).optimizer.load_state_dict(
                local.optimizer.state_dict()
            )
        local.optimizer.synchronize()
        make(communicator, onebit.DistributedSGD).optimizer.load_state_dict(
            local.optimizer.state_dict()
        )
        return True

    assert run_threads(2, run) == [True, True]
