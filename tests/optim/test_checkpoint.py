"""Nothing is lost on resume: state comes back bit for bit, and each rank's errors to that rank."""

import copy
import pickle
from functools import partial

import pytest
import torch
from helpers.cases import more
from helpers.small_runs import SMALL_SHAPES, everything, make, resumed, same, saved, step

import onebit
from onebit.comm import Single, run_threads
from onebit.compression import Quantize, TopK


@pytest.mark.report("R08")
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
def test_resuming_continues_as_if_never_stopped(options):
    """Before, at and after the freeze; the next freeze, too, happens at the same step."""
    places, end = (4, 8, 9, 15), 20

    def run(communicator):
        straight, kept = make(communicator, shapes=SMALL_SHAPES, **options), {}
        for t in range(end):
            step(straight, t, communicator.rank)
            if t + 1 in places:
                params = [p.detach().clone() for p in straight.params]
                kept[t + 1] = params, saved(straight.optimizer)
        others = [resumed(communicator, *kept[at], **options) for at in places]
        for at, other in zip(places, others):
            for t in range(at, end):
                step(other, t, communicator.rank)
        return straight, others

    results = run_threads(2, run)
    for straight, others in results:
        for other in others:
            assert same(everything(straight), everything(other))
            assert straight.optimizer.steps == other.optimizer.steps == end
    if "warmup" in options:  # the errors of the two ranks do differ
        assert not same(*(everything(straight) for straight, _ in results))


@pytest.mark.report("R38", "R39")
def test_state_has_the_same_keys_and_shapes_on_all_ranks_from_construction():
    def run(communicator):
        run = make(communicator, shapes=SMALL_SHAPES, warmup=3)
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


@pytest.mark.report("R19")
def test_state_can_be_pickled_and_copied():
    run = make(Single(), shapes=SMALL_SHAPES, warmup=3)
    for t in range(6):
        step(run, t, 0)
    state = run.optimizer.state_dict()
    for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert same(everything(run), everything(resumed(Single(), run.params, copied, warmup=3)))


def frozen(size, **options):
    """Each rank's (params, state) after 6 compressed steps; `synchronize` makes them one state."""
    synchronize = options.pop("synchronize", False)

    def run(communicator):
        run = make(communicator, shapes=SMALL_SHAPES, warmup=4, dtype=torch.float64)
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


@pytest.mark.report("R08")
@pytest.mark.parametrize("size", [1, 3, *more(2, 4)])
def test_a_synchronized_checkpoint_serves_any_number_of_ranks_and_loses_nothing(size):
    """mean worker error + server error, the residual of the telescoping sum, is the same before
    and after.
    """
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

    expected = residual + torch.cat([v.flatten() for v in Layout(SMALL_SHAPES, 3).views(server)])
    results = run_threads(size, load)
    for before, after in results:
        torch.testing.assert_close(before, expected, rtol=1e-12, atol=1e-14)
        assert same(after, results[0][1])


def test_resetting_errors_on_purpose_tells_what_is_lost():
    params, state = frozen(2)[0]
    lost = sum(float(s["worker_error"].square().sum()) for s in state["state"].values()) ** 0.5
    run = make(Single(), shapes=SMALL_SHAPES, warmup=4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=f"{lost:.3g} is lost"):
        run.optimizer.load_state_dict(state, reset_errors=True)
    assert run.optimizer.phase == "compressed" and not any(
        run.optimizer.state[p]["worker_error"].any() for p in run.params
    )
    torch.testing.assert_close(
        run.optimizer.state[run.params[0]]["exp_avg"], state["state"][0]["exp_avg"]
    )


def test_a_checkpoint_of_the_warmup_serves_every_rank():
    run = make(Single(), shapes=SMALL_SHAPES, warmup=10)
    for t in range(4):
        step(run, t, 0)
    state = saved(run.optimizer)
    for other in run_threads(3, lambda c: everything(resumed(c, run.params, state, warmup=10))):
        assert same(other[: len(SMALL_SHAPES)], everything(run)[: len(SMALL_SHAPES)])


def test_schedulers_find_their_initial_learning_rate_after_a_load():
    run = make(Single(), shapes=SMALL_SHAPES, warmup=10)
    torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
    other = resumed(Single(), run.params, saved(run.optimizer), warmup=10)
    torch.optim.lr_scheduler.StepLR(other.optimizer, 3, last_epoch=5)
    torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=20)
    other = resumed(Single(), run.params, saved(run.optimizer), warmup=10)
    torch.optim.lr_scheduler.OneCycleLR(other.optimizer, 0.1, total_steps=20, last_epoch=5)


@pytest.mark.report("R38")
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
