"""The removed optimizers' state is taken over: real files of 0.19.6, and made-up ones."""

import os
import warnings
from pathlib import Path

import pytest
import torch

import onebit
from onebit.comm import Single, run_threads
from onebit.deepspeed import from_config, load_state

FILES = Path(os.environ.get("ONEBIT_DATA_ROOT") or "../shared/data") / "deepspeed"
KINDS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
real = pytest.mark.skipif(not FILES.is_dir(), reason=f"no files of DeepSpeed 0.19.6 in {FILES}")


def old_file(kind):
    return torch.load(FILES / f"{kind}.pt", weights_only=True)


def old_entries(kind):
    state = old_file(kind)["optimizer"]["state"]
    return [state[i] for i in range(len(state))]


def model_of(kind):
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5))
    model.load_state_dict(old_file(kind)["module"])
    return model


def loaded(kind, communicator, **options):
    """(model, optimizer with the old state, the warning's text)."""
    model = model_of(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = old_file(kind)["ds_config"]
        optimizer = from_config(config, model.parameters(), communicator=communicator, **options)
        del caught[:]
        load_state(optimizer, old_file(kind))
    return model, optimizer, " | ".join(str(w.message) for w in caught)


def state_of(kind, communicator, **options):
    _, optimizer, said = loaded(kind, communicator, **options)
    return optimizer.state_dict()["state"], optimizer.steps, optimizer.phase, said


@real
@pytest.mark.parametrize("kind", KINDS)
def test_momentum_variance_and_step_are_taken_as_they_are(kind):
    for state, steps, phase, _ in run_threads(2, lambda c: state_of(kind, c)):
        assert steps == 10 and phase == "compressed"
        for i, old in enumerate(old_entries(kind)):
            assert torch.equal(state[i]["exp_avg"], old["exp_avg"])
            assert torch.equal(state[i]["exp_avg_sq"], old["exp_avg_sq"])


@real
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_errors_of_the_saving_rank_keep_their_share_of_the_mean(ranks):
    """mean_i delta_i + delta_bar = e_0 / 2 + the server's part, whatever the number of ranks is."""

    def shared(communicator):
        _, optimizer, _ = loaded("OneBitAdam", communicator)
        optimizer.synchronize()  # puts that sum into every worker error
        return [e["worker_error"] for e in optimizer.state_dict()["state"].values()]

    for errors in run_threads(ranks, shared):
        for error, old in zip(errors, old_entries("OneBitAdam")):
            expected = old["worker_error"][: old["tensor_size"]] / 2
            chunk = old["server_error"][: old["tensor_size"]]
            expected[: len(chunk)] += chunk
            torch.testing.assert_close(error.flatten(), expected)


@real
def test_one_warning_names_what_is_lost():
    *_, said = loaded("OneBitAdam", Single())
    assert "1 of 2 ranks" in said and "padding" in said and said.count("is lost") == 1


@real
def test_lambs_coefficients_ratios_and_scaling_are_taken():
    state, *_, said = state_of("OneBitLamb", Single())
    for i, old in enumerate(old_entries("OneBitLamb")):
        assert torch.equal(state[i]["exp_avg_sq_fresh"], old["exp_avg_sq_fresh"])
        assert float(state[i]["coefficient_average"]) == old["lamb_coeff_freeze"]
        assert float(state[i]["ratio"]) == old["last_factor"]
        assert float(state[i]["scaling"]) == old["scaling_coeff"]
    assert "errors of all ranks" in said


@real
def test_zero_one_adam_has_its_errors_in_units_of_the_momentum():
    """After the freeze they were those of minus lr times the momentum."""
    state, *_ = state_of("ZeroOneAdam", Single())
    for i, old in enumerate(old_entries("ZeroOneAdam")):
        error = old["worker_error"][: old["tensor_size"]] / -1e-3 / 2
        torch.testing.assert_close(state[i]["worker_error"].flatten(), error)
        assert not state[i]["accumulator"].any()


@real
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_there(kind):
    """The next steps stay near those of the same state without errors, and replicas are equal."""

    def goes_on(communicator):
        model, optimizer, _ = loaded(kind, communicator)
        before = [p.detach().clone() for p in model.parameters()]
        losses = []
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + communicator.rank)
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 6, generator=generator)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        after = [p.detach() for p in model.parameters()]
        moved = max(float((a - b).abs().max()) for a, b in zip(after, before))
        return after, moved, optimizer.steps, losses

    first, second = run_threads(2, goes_on)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0]))
    assert first[2] == 18 and 0 < first[1] < 0.5
    assert all(torch.isfinite(p).all() for p in first[0])


@real
@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_the_phase_follows_the_new_freeze_step(kind):
    model, optimizer, _ = loaded(kind, Single(), warmup=30)
    assert optimizer.phase == "warmup"
    total = [e["worker_error"].clone() for e in optimizer.state_dict()["state"].values()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.steps == 11 and not optimizer._is_compressing
    assert len(total) == 4


@real
def test_a_file_of_another_optimizer_is_refused():
    model = model_of("OneBitAdam")
    optimizer = onebit.OneBitAdam(model.parameters(), warmup=3, communicator=Single())
    with pytest.raises(ValueError, match="DeepSpeed's ZeroOneAdam.*onebit.ZeroOneAdam"):
        load_state(optimizer, old_file("ZeroOneAdam"))
    with pytest.raises(ValueError, match="no state of the optimizers"):
        load_state(optimizer, torch.optim.Adam(model.parameters()).state_dict())
    fewer = onebit.OneBitAdam(list(model.parameters())[:3], warmup=3, communicator=Single())
    with pytest.raises(ValueError, match="4 parameters, the optimizer has 3"):
        load_state(fewer, old_file("OneBitAdam"))


def between_syncs(p, lr=0.1, decay=0.1, eps=1e-8):
    """0/1 Adam as DeepSpeed leaves it after two local steps from `p`: (x, old state dict)."""
    momentum, variance = torch.full_like(p, 0.3), torch.full_like(p, 4.0)
    x, moved = p.clone(), torch.zeros_like(p)
    for _ in range(2):
        update = momentum / (variance.sqrt() + eps) + decay * x
        x, moved = x - lr * update, moved - lr * update
    entry = {
        "step": 22,
        "exp_avg": momentum,
        "exp_avg_sq": variance,
        "var_interval": 4,
        "var_counter": 1,
        "local_step_interval": 4,
        "local_step_counter": 8,
        "lrs": 2 * lr,
        "tensor_size": p.numel(),
        "corrected_tensor_size": p.numel(),
        "server_chunk_size": p.numel(),
        "worker_error": torch.zeros(p.numel()),
        "server_error": torch.zeros(p.numel()),
        "momentum_accumulator": moved,
    }
    group = {"lr": lr, "betas": (0.9, 0.99), "eps": eps, "weight_decay": decay, "params": [0]}
    group |= {"bias_correction": True, "max_grad_norm": 0.0}
    return x, {"state": {0: entry}, "param_groups": [group]}


def test_what_zero_one_adam_has_accumulated_is_taken():
    """A sync without loss leads from x_sync to where the local steps have led."""
    start = torch.linspace(-1, 1, 64)
    x, state = between_syncs(start)
    p = torch.nn.Parameter(x.clone())
    block = {"type": "ZeroOneAdam", "params": {"var_freeze_step": 12, "local_step_scaler": 2}}
    optimizer = from_config(
        block, [p], communicator=Single(), compressor=onebit.compression.Identity
    )
    load_state(optimizer, state)
    entry = optimizer.state_dict()["state"][0]
    torch.testing.assert_close(entry["synced_parameter"], start)
    optimizer.synchronize()
    torch.testing.assert_close(p.detach(), x)
    torch.testing.assert_close(
        optimizer.state_dict()["state"][0]["exp_avg"], torch.full_like(p, 0.3 * (2 - 0.01) / 2)
    )  # the first of the two local steps was decayed by the second


def test_intervals_go_on_from_the_next_multiple():
    x, state = between_syncs(torch.ones(64))
    block = {
        "type": "ZeroOneAdam",
        "params": {"var_freeze_step": 100, "var_update_scaler": 3, "local_step_scaler": 2},
    }
    optimizer = from_config(block, [torch.nn.Parameter(x)], communicator=Single())
    load_state(optimizer, state)
    sets = optimizer.state_dict()["param_groups"][0]["onebit"]["step_sets"]
    assert sets["variance"] == [24, 2 * 3 + 1] and sets["syncs"] == [24, 2 * 2 + 2]


def test_the_mask_of_this_run_holds_in_an_old_state():
    x, state = between_syncs(torch.ones(64))
    mask = torch.ones(64)
    mask[40:] = 0
    state["param_groups"][0]["exp_avg_mask"] = torch.ones(64)
    block = {"type": "ZeroOneAdam", "params": {"var_freeze_step": 12}}
    groups = [{"params": [torch.nn.Parameter(x)], "exp_avg_mask": mask}]
    optimizer = from_config(block, groups, communicator=Single())
    load_state(optimizer, state)
    momentum = optimizer.state_dict()["state"][0]["exp_avg"]
    assert momentum[:40].all() and not momentum[40:].any()
    assert torch.equal(optimizer.param_groups[0]["exp_avg_mask"], mask)
