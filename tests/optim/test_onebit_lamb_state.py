"""A new warm-up and checkpoints of 1-bit LAMB lose nothing."""

from functools import partial

import pytest
import torch
from helpers.cases import more
from helpers.lamb_runs import numbers
from helpers.small_runs import everything, make, same, saved, step

import onebit
from onebit.comm import Single, run_threads
from onebit.compression import Quantize
from onebit.optim.onebit_lamb import scaling_coefficients


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_new_warmup_keeps_what_the_errors_hold_and_the_average_coefficient(scale):
    """m after = m before + (mean worker error + server error) / scaling; c_avg goes on.

    The next freeze makes scaling, v_fresh and r anew.
    """

    def run(communicator):
        run = make(
            communicator,
            onebit.OneBitLamb,
            shapes=((70,), (129,)),
            warmup=12,
            dtype=torch.float64,
            scale=scale,
        )
        for t in range(20):
            step(run, t, communicator.rank, scale=1.0 + t)
        (part,) = run.optimizer._run.buckets
        before = (
            part.momentum.clone(),
            *part.errors(),
            part.scaling.clone(),
            part.coefficient_average.clone(),
        )
        run.optimizer.restart_warmup(4)
        after = (
            part.momentum.clone(),
            any(error.any() for error in part.errors()),
            part.coefficient_average.clone(),
        )
        for t in range(20, 24):
            assert run.optimizer.phase == "warmup"
            step(run, t, communicator.rank)
        return before, after, part.layout, part

    results = run_threads(3, run)
    layout = results[0][2]
    error = sum(r[0][1] for r in results) / 3 + torch.cat([r[0][2] for r in results])
    for (momentum, _, _, scaling, average), (new, left, average_after), _, part in results:
        for i, (m, e, expected) in enumerate(
            zip(*(layout.views(x) for x in (momentum, error, new)))
        ):
            torch.testing.assert_close(m + e / scaling[i], expected, rtol=1e-12, atol=1e-14)
        assert not left and torch.equal(average, average_after)
        assert part.ratio.tolist() == [1.0, 1.0] and torch.equal(part.fresh_variance, part.variance)
        assert not torch.equal(part.coefficient_average, average)
        own = [float(m.square().mean().sqrt()) for m in layout.views(part.momentum)]
        assert part.scaling.tolist() == (
            pytest.approx(scaling_coefficients(own)) if scale == "fused" else [1.0, 1.0]
        )


def test_a_freeze_without_any_coefficient_raises_with_the_remedy():
    """torch's AdamW at step 20, T_w = 15: there is nothing to multiply the learning rate by,
    and x would stand still.
    """
    run = make(Single(), onebit.OneBitLamb, warmup=15)
    adamw = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in run.params])
    for _ in range(20):
        for p in adamw.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        adamw.step()
    run.optimizer.load_state_dict(adamw.state_dict())
    torch.testing.assert_close(
        run.optimizer.state[run.params[0]]["exp_avg"],
        adamw.state[adamw.param_groups[0]["params"][0]]["exp_avg"],
    )
    with pytest.raises(RuntimeError, match="restart_warmup"):
        step(run, 0, 0)
    run.optimizer.restart_warmup(12)
    for t in range(14):
        step(run, t, 0)
    assert run.optimizer.phase == "compressed" and min(numbers(run, "coefficient")) > 0


def test_a_load_in_the_warmup_keeps_the_count_of_averaged_coefficients(recwarn):
    run, other = (make(Single(), onebit.OneBitLamb, warmup=12) for _ in range(2))
    for t in range(11):
        step(run, t, 0)
    other.optimizer.load_state_dict(saved(run.optimizer))
    step(other, 11, 0)
    assert other.optimizer.phase == "compressed" and not any(
        "coefficient_beta" in str(w.message) for w in recwarn
    )


def frozen(kind, **options):
    run = make(Single(), kind, warmup=12, bias_correction=False, **options)
    for t in range(14):
        step(run, t, 0)
    return saved(run.optimizer)


def test_a_compressed_phase_is_taken_over_only_by_what_can_go_on_with_it():
    fused, adam = frozen(onebit.OneBitLamb, scale="fused"), frozen(onebit.OneBitAdam)
    for state, kind, options, message in (
        (fused, onebit.OneBitLamb, {"warmup": 12, "scale": "tensor"}, "scale='fused': set scale"),
        (adam, onebit.OneBitLamb, {"warmup": 12}, "OneBitAdam, which has no coefficients"),
        (fused, onebit.OneBitAdam, {"warmup": 12}, "errors of OneBitLamb"),
        (fused, onebit.Lamb, {}, "load it into onebit.OneBitLamb"),
    ):
        for reset in (False, True) if kind is not onebit.OneBitAdam else (False,):
            run = make(Single(), kind, **options)
            with pytest.raises(ValueError, match=message):
                run.optimizer.load_state_dict(state, reset_errors=reset)
            assert (
                run.optimizer.steps == 0 and not run.optimizer.state[run.params[0]]["exp_avg"].any()
            )


@pytest.mark.parametrize("size", [1, 4, *more(2)])
@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_synchronized_checkpoint_of_lamb_serves_any_number_of_ranks(size, scale):
    """The errors lie where their parameters are, whatever chunks they were served in, and all
    ranks go on alike.
    """

    def save(communicator):
        run = make(communicator, onebit.OneBitLamb, shapes=((70,), (9, 15)), warmup=12, scale=scale)
        for t in range(16):
            step(run, t, communicator.rank)
        run.optimizer.synchronize()
        return run.params, saved(run.optimizer)

    params, state = run_threads(3, save)[1]

    def load(communicator):
        run = make(communicator, onebit.OneBitLamb, shapes=((70,), (9, 15)), warmup=12, scale=scale)
        with torch.no_grad():
            for p, value in zip(run.params, params):
                p.copy_(value)
        run.optimizer.load_state_dict(state)
        errors = [run.optimizer.state[p]["worker_error"].clone() for p in run.params]
        for t in range(5):
            step(run, t, communicator.rank)
        return errors, [p.detach() for p in run.params]

    results = run_threads(size, load)
    for errors, after in results:
        assert (
            same(errors, [entries["worker_error"] for entries in state["state"].values()])
            and errors[0].any()
        )
        assert same(after, results[0][1])


def test_distributed_checkpoint_keeps_the_numbers_of_each_tensor():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def trained(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
        optimizer = onebit.OneBitLamb(model.parameters(), warmup=12, communicator=Single())
        for t in range(steps):
            model(torch.full((2, 5), float(t))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (model, optimizer), (other_model, other) = trained(16), trained(1)
    set_optimizer_state_dict(other_model, other, get_optimizer_state_dict(model, optimizer))
    for p, q in zip(model.parameters(), other_model.parameters()):
        assert all(
            torch.equal(optimizer.state[p][name], other.state[q][name])
            for name in (*optimizer.tensor_scalars, "exp_avg_sq_fresh")
        )


@pytest.mark.parametrize("scale", ["tensor", "fused"])
def test_a_resumed_run_makes_the_random_draws_that_it_would_have_made(scale):
    options = {
        "kind": onebit.OneBitLamb,
        "warmup": 8,
        "coefficient_beta": 0.8,
        "scale": scale,
        "compressor": partial(Quantize, bits=4, stochastic=True),
        "shapes": ((70,), (9, 15), (0, 4)),
    }

    def run(communicator):
        straight = make(communicator, **options)
        for t in range(20):
            step(straight, t, communicator.rank)
            if t == 12:
                params, state = (
                    [p.detach().clone() for p in straight.params],
                    saved(straight.optimizer),
                )
        other = make(communicator, **options)
        with torch.no_grad():
            for p, value in zip(other.params, params):
                p.copy_(value)
        other.optimizer.load_state_dict(state)
        for t in range(13, 20):
            step(other, t, communicator.rank)
        return same(everything(straight), everything(other))

    assert all(run_threads(2, run))
