"""What a user of README alone may do, and must not be punished for in silence."""

import pytest
import torch
from test_behaviour import everything, make, same, step
from test_dropin import torch_state

import onebit
from onebit.comm import Single, run_threads


@pytest.mark.parametrize("steps", range(7))
def test_a_foreign_state_is_taken_over_the_same_wherever_zero_one_adam_was(steps):
    """Between two syncs, too: what had been accumulated is no more, and the parameters stay where they are."""
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


def test_an_option_of_the_whole_optimizer_in_a_group_is_refused():
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "variance_floor": 1e-3}
    with pytest.raises(TypeError, match="variance_floor is an option of OneBitAdam as a whole"):
        onebit.OneBitAdam([group], warmup=3)


def test_a_rank_that_catches_the_error_of_a_mismatch_ends_nobody_in_a_deadlock():
    """The other must see the mismatch too, however late it wakes up."""

    def run(communicator):
        if communicator.rank == 0:
            try:
                communicator.all_gather(torch.zeros(1, dtype=torch.uint8))
            except RuntimeError:
                return

    for _ in range(1000):
        with pytest.raises(RuntimeError, match="met in different collectives"):
            run_threads(2, run, timeout=5)
