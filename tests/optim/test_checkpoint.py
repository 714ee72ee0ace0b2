"""Nothing is lost on resume: state comes back bit for bit, each rank's errors to that rank, and a wrong file is refused."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from test_behaviour import everything, make, same, step

import onebit
from onebit.comm import Single, run_threads
from onebit.compression import Quantize, TopK

SHAPES = ((70,), (9, 15), (0, 4))


def saved(optimizer):
    """A state_dict that has been through torch.save, read by the safe loader."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed(communicator, params, state, **options):
    run = make(communicator, shapes=SHAPES, **options)
    with torch.no_grad():
        for p, value in zip(run.params, params):
            p.copy_(value)
    run.optimizer.load_state_dict(state)
    return run


@pytest.mark.parametrize("at", [4, 8, 9, 15])
@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 8},
        {"kind": onebit.NaiveOneBitAdam},
        {"kind": onebit.DistributedAdam},
        {"kind": onebit.Lamb},
        {"warmup": 8, "kind": onebit.OneBitLamb, "coefficient_beta": 0.8},
        {"warmup": 8, "kind": onebit.OneBitLamb, "coefficient_beta": 0.8, "scale": "fused"},
        {"warmup": onebit.VarianceRatio(0.5, min_steps=6, window=3)},
        {"warmup": 8, "dtype": torch.bfloat16},
        {"warmup": 8, "max_grad_norm": 1.0},
        {"kind": onebit.DistributedSGD, "momentum": 0.9},
        {"kind": onebit.DoubleSqueeze, "weight_decay": 0.1},
        {"kind": onebit.EFMomentumSGD},
        {"kind": onebit.LocalSGD, "momentum": 0.9},
        {"kind": onebit.LocalSGD, "dtype": torch.bfloat16},
        {"warmup": 8, "compressor": partial(Quantize, bits=4, stochastic=True)},
        {"warmup": 8, "compressor": partial(TopK, density=0.1)},
        {"kind": onebit.QuantizedVarianceAdam},
        {"kind": onebit.LazyVarianceAdam},
        {"kind": onebit.LazyVarianceAdam, "tau": 4, "steps_with": "average"},
    ],
    ids=str,
)
def test_resuming_continues_as_if_never_stopped(at, options):
    """Before, at and after the freeze; the next freeze, too, happens at the same step."""

    def run(communicator):
        straight = make(communicator, shapes=SHAPES, **options)
        for t in range(20):
            step(straight, t, communicator.rank)
            if t + 1 == at:
                params, state = (
                    [p.detach().clone() for p in straight.params],
                    saved(straight.optimizer),
                )
        other = resumed(communicator, params, state, **options)
        phases = [other.optimizer.phase]
        for t in range(at, 20):
            step(other, t, communicator.rank)
        return (
            everything(straight),
            everything(other),
            straight.optimizer.steps,
            other.optimizer.steps,
            phases,
        )

    results = run_threads(2, run)
    for straight, other, steps, other_steps, _ in results:
        assert same(straight, other) and steps == other_steps == 20
    if "warmup" in options and at == 15:
        assert not same(results[0][0], results[1][0])  # the errors of the two ranks do differ


def test_state_has_the_same_keys_and_shapes_on_all_ranks_from_construction():
    def run(communicator):
        run = make(communicator, shapes=SHAPES, warmup=3)
        described = []
        for t in range(6):
            entries = run.optimizer.state_dict()["state"].values()
            described.append(
                [
                    (name, tuple(value.shape), value.dtype)
                    for entry in entries
                    for name, value in entry.items()
                ]
            )
            step(run, t, communicator.rank)
        return described

    results = run_threads(3, run)
    assert all(entry == results[0][0] for described in results for entry in described)


def test_state_can_be_pickled_and_copied():
    run = make(Single(), shapes=SHAPES, warmup=3)
    for t in range(6):
        step(run, t, 0)
    state = run.optimizer.state_dict()
    for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert same(everything(run), everything(resumed(Single(), run.params, copied, warmup=3)))


def frozen(size, **options):
    """Each rank's (params, state) after 6 compressed steps; `synchronize` makes them one state."""
    synchronize = options.pop("synchronize", False)

    def run(communicator):
        run = make(communicator, shapes=SHAPES, warmup=4, dtype=torch.float64)
        for t in range(10):
            step(run, t, communicator.rank)
        if synchronize:
            run.optimizer.synchronize()
        return run.params, saved(run.optimizer)

    return run_threads(size, run)


@pytest.mark.parametrize("size, rank", [(2, 1), (3, 0), (1, 0)])
def test_another_ranks_errors_are_refused_with_the_remedy(size, rank):
    params, state = frozen(2)[0]

    def load(communicator):
        if communicator.rank == rank:
            with pytest.raises(ValueError, match="synchronize.*reset_errors=True"):
                resumed(communicator, params, state, warmup=4, dtype=torch.float64)

    run_threads(size, load)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_synchronized_checkpoint_serves_any_number_of_ranks_and_loses_nothing(size):
    """mean worker error + server error, the residual of the telescoping sum, is the same before and after."""
    unsynchronized = frozen(3)
    residual = (
        sum(
            torch.cat([s["state"][i]["worker_error"].flatten() for i in range(3)])
            for _, s in unsynchronized
        )
        / 3
    )
    server = torch.cat([s["state"][0]["server_error"] for _, s in unsynchronized])
    params, state = frozen(3, synchronize=True)[2]

    def load(communicator):
        run = resumed(communicator, params, state, warmup=4, dtype=torch.float64)
        before = torch.cat([run.optimizer.state[p]["worker_error"].flatten() for p in run.params])
        assert not run.optimizer.state[run.params[0]]["server_error"].any()
        for t in range(5):
            step(run, t, communicator.rank)
        return before, [p.detach() for p in run.params]

    from onebit.layout import Layout

    expected = residual + torch.cat([v.flatten() for v in Layout(SHAPES, 3).views(server)])
    results = run_threads(size, load)
    for before, after in results:
        torch.testing.assert_close(before, expected, rtol=1e-12, atol=1e-14)
        assert same(after, results[0][1])


def test_resetting_errors_on_purpose_tells_what_is_lost():
    params, state = frozen(2)[0]
    lost = sum(float(s["worker_error"].square().sum()) for s in state["state"].values()) ** 0.5
    run = make(Single(), shapes=SHAPES, warmup=4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=f"{lost:.3g} is lost"):
        run.optimizer.load_state_dict(state, reset_errors=True)
    assert run.optimizer.phase == "compressed" and not any(
        run.optimizer.state[p]["worker_error"].any() for p in run.params
    )
    torch.testing.assert_close(
        run.optimizer.state[run.params[0]]["exp_avg"], state["state"][0]["exp_avg"]
    )


def test_a_checkpoint_of_the_warmup_serves_every_rank():
    run = make(Single(), shapes=SHAPES, warmup=10)
    for t in range(4):
        step(run, t, 0)
    state = saved(run.optimizer)
    for other in run_threads(3, lambda c: everything(resumed(c, run.params, state, warmup=10))):
        assert same(other[: len(SHAPES)], everything(run)[: len(SHAPES)])


@pytest.mark.parametrize("before, after", [(10, 5), (4, 12)])
def test_the_phase_follows_the_new_setting_after_a_load(before, after):
    """Saved at step 8: T_w lowered below it freezes at once; T_w raised above it thaws and freezes anew later."""

    def run(communicator):
        run = make(communicator, shapes=SHAPES, warmup=before)
        for t in range(8):
            step(run, t, communicator.rank)
        other = resumed(communicator, run.params, saved(run.optimizer), warmup=after)
        phases = []
        for t in range(8, 16):
            phases.append(other.optimizer.phase)
            step(other, t, communicator.rank)
        return phases, [p.detach() for p in other.params]

    for phases, params in run_threads(2, run):
        assert phases == ["compressed"] * 8 if after == 5 else ["warmup"] * 4 + ["compressed"] * 4
        assert all(torch.isfinite(p).all() for p in params)


def frozen_at_20(warmup):
    run = make(Single(), shapes=SHAPES, warmup=warmup, betas=(0.9, 0.8))
    for t in range(20):
        step(run, t, 0)
    return run


def test_rolling_back_behind_a_restart_forgets_the_restart():
    run = frozen_at_20(10)
    state = saved(run.optimizer)
    run.optimizer.restart_warmup(50)
    run.optimizer.load_state_dict(state)
    assert run.optimizer.phase == "compressed"


@pytest.mark.parametrize(
    "old, new, phase",
    [
        (
            onebit.VarianceRatio(0.1, min_steps=0),
            onebit.VarianceRatio(0.1, min_steps=1000),
            "warmup",
        ),
        (
            onebit.VarianceRatio(0.1, min_steps=0),
            onebit.VarianceRatio(0.1, min_steps=0),
            "compressed",
        ),
        (onebit.VarianceRatio(0.1, min_steps=0), 200, "warmup"),
    ],
)
def test_a_chosen_freeze_holds_only_under_the_policy_that_chose_it(old, new, phase):
    state = saved(frozen_at_20(old).optimizer)
    other = make(Single(), shapes=SHAPES, warmup=new, betas=(0.9, 0.8))
    other.optimizer.load_state_dict(state)
    assert other.optimizer.phase == phase


def test_a_restart_holds_only_under_the_policy_that_it_interrupted():
    run = frozen_at_20(10)
    run.optimizer.restart_warmup(5)
    for warmup, last in ((10, 25), (200, 200)):
        other = make(Single(), shapes=SHAPES, warmup=warmup, betas=(0.9, 0.8))
        other.optimizer.load_state_dict(saved(run.optimizer))
        assert other.optimizer.warmup.steps == last


def test_a_frozen_variance_is_not_taken_for_a_raw_one():
    state = saved(frozen_at_20(10).optimizer)
    with pytest.raises(ValueError, match="restart_warmup"):
        make(Single(), onebit.DistributedAdam, shapes=SHAPES).optimizer.load_state_dict(state)


def test_errors_are_taken_only_by_the_optimizer_that_made_them():
    """NaiveOneBitAdam's are in units of the gradient, OneBitAdam's of the momentum; and a server error belongs to its bucket."""
    options = {"shapes": SHAPES, "bias_correction": False}
    run = make(Single(), warmup=3, **options)
    for t in range(6):
        step(run, t, 0)
    with pytest.raises(ValueError, match="load it into onebit.OneBitAdam"):
        make(Single(), onebit.NaiveOneBitAdam, **options).optimizer.load_state_dict(
            saved(run.optimizer)
        )
    state = saved(run.optimizer)
    del state["param_groups"][0]["onebit"]["chunks"]
    with pytest.raises(ValueError, match="other buckets"):
        make(Single(), warmup=3, **options).optimizer.load_state_dict(state)


def test_loading_torch_adamw_starts_from_its_moments():
    params = [torch.nn.Parameter(torch.ones(s)) for s in SHAPES]
    adamw = torch.optim.AdamW(params, lr=0.3)
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    adamw.step()
    run = make(Single(), shapes=SHAPES, warmup=10)
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


def test_schedulers_find_their_initial_learning_rate_after_a_load():
    run = make(Single(), shapes=SHAPES, warmup=10)
    torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
    other = resumed(Single(), run.params, saved(run.optimizer), warmup=10)
    torch.optim.lr_scheduler.StepLR(other.optimizer, 3, last_epoch=5)
    torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=20)
    other = resumed(Single(), run.params, saved(run.optimizer), warmup=10)
    torch.optim.lr_scheduler.OneCycleLR(other.optimizer, 0.1, total_steps=20, last_epoch=5)


def test_a_state_with_other_groups_is_refused():
    run = make(Single(), shapes=SHAPES, warmup=10)
    with pytest.raises(ValueError, match="parameter group"):
        make(Single(), shapes=SHAPES[:2], warmup=10).optimizer.load_state_dict(
            run.optimizer.state_dict()
        )


def test_distributed_checkpoint_state_round_trips():
    """torch.distributed.checkpoint's state dicts, keyed by parameter names."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def trained(steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
        optimizer = onebit.OneBitAdam(model.parameters(), warmup=3, communicator=Single())
        for t in range(steps):
            model(torch.full((2, 5), float(t))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(6)
    other_model, other = trained(1)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(other_model, other, state)
    assert other.steps == 6 and other.phase == "compressed"
    for p, q in zip(model.parameters(), other_model.parameters()):
        assert all(
            torch.equal(optimizer.state[p][name], other.state[q][name])
            for name in ("exp_avg", "exp_avg_sq", "worker_error")
        )
