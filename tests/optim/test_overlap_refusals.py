"""Whatever would make an overlapped step wrong raises."""

import pytest
import torch
from helpers.nets import backward, state_of
from helpers.overlapped import OVERLAP_KINDS, SMALL, make_net
from helpers.small_runs import same

import onebit
from onebit.comm import Single, run_threads


def one_step(**options):
    model, optimizer = make_net(Single(), warmup=1, bucket_cap_mb=SMALL, overlap=True, **options)
    backward(model, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, 0)
    return model, optimizer


@pytest.mark.parametrize(
    "change",
    [
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: setattr(model.layers[2].weight, "grad", torch.zeros(17, 17)),
        lambda model: setattr(model.layers[2].weight, "grad", None),
    ],
)
def test_a_gradient_that_changes_after_its_bucket_left_raises(change):
    model, optimizer = one_step()
    before = state_of(model, optimizer)
    change(model)
    with pytest.raises(RuntimeError, match="changed after its bucket had left"):
        optimizer.step()
    assert same(before, state_of(model, optimizer))


def test_accumulation_without_no_sync_raises():
    model, _ = one_step()
    with pytest.raises(RuntimeError, match="no_sync"):
        backward(model, 2, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.restart_warmup(3),
        lambda o: o.synchronize(),
        lambda o: o.load_state_dict(o.state_dict()),
    ],
)
def test_what_changes_the_state_must_wait_for_the_step(call):
    _, optimizer = one_step()
    with pytest.raises(RuntimeError, match="after step"):
        call(optimizer)
    optimizer.step()
    call(optimizer)


def test_what_overlap_excludes_is_refused_with_the_remedy():
    for kind, options in OVERLAP_KINDS:
        with pytest.raises(ValueError, match="max_grad_norm=None, or overlap=False"):
            make_net(Single(), kind, overlap=True, max_grad_norm=1.0, **options)
    with pytest.raises(ValueError, match="overlap must be True or False"):
        make_net(Single(), warmup=3, overlap=1)
    with pytest.raises(ValueError, match="bucket_cap_mb must"):
        make_net(Single(), warmup=3, bucket_cap_mb=0)


def test_an_error_in_the_background_is_raised_by_step():
    def run(communicator):
        model, optimizer = make_net(communicator, warmup=1, bucket_cap_mb=SMALL, overlap=True)
        backward(model, 0, communicator.rank)
        optimizer.step()
        if communicator.rank == 1:
            raise KeyError("rank 1 has failed")
        optimizer.zero_grad()
        backward(model, 1, communicator.rank)
        with pytest.raises(RuntimeError, match="released from|did not come"):
            optimizer.step()

    with pytest.raises(KeyError, match="rank 1 has failed"):
        run_threads(2, run, timeout=60)


def test_a_dropped_optimizer_leaves_its_parameters_alone():
    model, optimizer = one_step()
    del optimizer
    backward(model, 2, 0)


def test_a_state_saved_with_other_buckets_is_refused_with_the_remedy():
    model, optimizer = one_step()
    optimizer.step()
    for cap in (SMALL, None):
        other_model, other = make_net(Single(), warmup=1, bucket_cap_mb=cap)
        other_model.load_state_dict(model.state_dict())
        if cap:
            other.load_state_dict(optimizer.state_dict())
            assert same(state_of(model, optimizer), state_of(other_model, other))
        else:
            with pytest.raises(ValueError, match="bucket_cap_mb.*synchronize.*reset_errors"):
                other.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    other.load_state_dict(optimizer.state_dict())


def test_betas_that_change_after_a_bucket_left_raise():
    _, optimizer = one_step()
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(RuntimeError, match="betas changed"):
        optimizer.step()


def test_the_way_out_after_an_interrupted_backward_is_the_one_in_the_message():
    """A new optimizer with the old one's state goes on as if the broken step had never begun."""
    model, optimizer = one_step()
    with pytest.raises(RuntimeError, match="make a new optimizer, load this one's state_dict"):
        backward(model, 2, 0)
    state = optimizer.state_dict()
    del optimizer
    model.zero_grad()
    groups = [{"params": model.layers.parameters()}, {"params": model.sometimes.parameters()}]
    other = onebit.OneBitAdam(
        groups, warmup=1, bucket_cap_mb=SMALL, overlap=True, communicator=Single()
    )
    other.load_state_dict(state)
    for t in range(2, 4):
        backward(model, t, 0)
        other.step()
        other.zero_grad()
    assert other.steps == 3
