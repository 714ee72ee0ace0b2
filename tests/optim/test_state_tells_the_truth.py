"""What users do to an optimizer's state is exact, or an error before anything changes."""

import copy
import io
from collections import defaultdict

import pytest
import torch
from helpers.optimizer_kinds import KINDS
from helpers.refusals import matches, refusal
from helpers.small_runs import everything, make, same, step

import onebit
from onebit.comm import Single
from onebit.optim.loadable import FAMILYS, TORCHS


def trained(steps=6, **options):
    run = make(Single(), **({"warmup": 3} | options))
    for t in range(steps):
        step(run, t, 0)
    return run


@pytest.mark.report("F01")
def test_torchs_defaults_at_construction_change_nothing():
    runs = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            with torch.device("meta" if default == torch.bfloat16 else "cpu"):
                params = [torch.nn.Parameter(torch.ones(5, dtype=torch.float32, device="cpu"))]
                run = onebit.OneBitLamb(params, warmup=300, communicator=Single())
        finally:
            torch.set_default_dtype(torch.float32)
        for _ in range(302):
            params[0].grad = torch.ones(5)
            run.step()
        runs.append((run.steps, run.phase, params[0].tolist()))
    assert runs[0] == runs[1] and runs[0][:2] == (302, "compressed")


def spoiled(state, name, value):
    state = copy.deepcopy(state)
    if value is None:
        del state["state"][0][name]
    else:
        state["state"][0][name] = value
    return state


@pytest.mark.report("B01", "B15", "F17")
def test_a_damaged_state_is_refused_before_anything_changes():
    state = trained().optimizer.state_dict()
    own = state["state"][0]
    short = {name: x.flatten()[:3] for name, x in own.items() if name != "step"}
    cases = [
        *((name, x) for name, x in short.items()),
        *((name, None) for name in short if name != "server_error"),
        *(("step", torch.tensor(x)) for x in (torch.inf, torch.nan, -1.0, 2.5, 4.0)),
        *(("exp_avg_sq", torch.full_like(own["exp_avg_sq"], x)) for x in (-1.0, torch.nan)),
        ("server_error", None),
        ("server_error", own["server_error"][:-1]),
    ]
    fresh = make(Single(), warmup=3)
    before = everything(fresh)
    accepted = [
        (name, x)
        for name, x in cases
        if not matches(refusal(fresh.optimizer.load_state_dict, spoiled(state, name, x)), "Value")
    ]
    assert accepted == [] and same(before, everything(fresh))
    for options in ({"bias_correction": False}, {"variance_floor": 1e-3}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(Single(), warmup=3, **options).optimizer.load_state_dict(state)


@pytest.mark.report("F03")
def test_hooks_of_state_dicts_act_on_what_is_saved_and_loaded():
    run = trained()
    state = run.optimizer.state_dict()
    seen = []
    run.optimizer.register_state_dict_post_hook(lambda o, found: found["state"].clear())
    assert run.optimizer.state_dict()["state"] == {}
    other = make(Single(), warmup=3)
    other.optimizer.register_load_state_dict_pre_hook(lambda o, found: seen.append(found) or state)
    other.optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.steps))
    other.optimizer.load_state_dict({})
    assert seen == [{}, 6]


def replaced(run):
    group = run.optimizer.param_groups[0]
    group["params"][0] = torch.nn.Parameter(group["params"][0].detach().clone())


def resized(run):
    arena = torch.full((4096,), 7.0)
    run.params[0].data = arena[:20].view(4, 5)[:2]
    run.params[0].grad = None
    return arena


@pytest.mark.report("F04", "F04c")
@pytest.mark.parametrize(
    "change",
    [
        replaced,
        resized,
        lambda run: run.optimizer.param_groups[0]["params"].pop(),
        lambda run: run.optimizer.param_groups[0]["params"].append(
            torch.nn.Parameter(torch.ones(3))
        ),
        lambda run: run.optimizer.param_groups.pop(),
        lambda run: setattr(run.params[0], "data", run.params[0].data.double()),
    ],
)
def test_parameters_that_the_layout_does_not_know_are_an_error_before_anything_moves(change):
    run = trained()
    kept = run.params[1].detach().clone()
    arena = change(run)
    for p in run.params:
        p.grad = None
    run.params[1].grad = torch.ones(9)
    with pytest.raises(RuntimeError, match="make a new optimizer|then make it"):
        run.optimizer.step()
    assert torch.equal(kept, run.params[1]) and run.optimizer.steps == 6
    if change is resized:
        assert bool((arena == 7).all())


@pytest.mark.report("F04")
def test_groups_replaced_by_equal_ones_are_followed():
    run = trained()
    run.optimizer.param_groups = [dict(run.optimizer.param_groups[0], lr=0.0)]
    before = run.params[0].detach().clone()
    step(run, 9, 0)
    assert torch.equal(before, run.params[0])


@pytest.mark.report("F05", "F17")
def test_nothing_in_a_saved_state_is_shared_or_part_of_something_larger():
    run = trained()
    state = run.optimizer.state_dict()
    tensors = [x for entries in state["state"].values() for x in entries.values()]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    assert all(x.untyped_storage().nbytes() == x.nbytes and x.is_contiguous() for x in tensors)
    before = everything(run)
    for x in tensors:
        x.zero_()
    assert same(before, everything(run)) and run.optimizer.steps == 6
    adamw = torch.optim.AdamW(run.params)
    adamw.load_state_dict(trained(2).optimizer.state_dict())
    adamw.step()
    assert [float(entries["step"]) for entries in adamw.state.values()] == [3, 3]


@pytest.mark.report("F10")
def test_writes_into_the_state_are_taken_or_refused():
    for write in (
        lambda o, p: setattr(o, "state", defaultdict(dict)),
        lambda o, p: o.state.clear(),
        lambda o, p: o.state.pop(p),
        lambda o, p: o.state[p].update(exp_avg=torch.zeros(4, 5)),
        lambda o, p: o.state[p]["exp_avg"].zero_(),
        lambda o, p: o.state[p]["exp_avg"].view(-1)[:2].fill_(0),
        lambda o, p: o.state[p]["worker_error"].__setitem__(0, 0),
        lambda o, p: o.state[p]["step"].zero_(),
        lambda o, p: setattr(o.state[p]["exp_avg_sq"], "data", torch.zeros(4, 5)),
        lambda o, p: o.state[p].clear(),
    ):
        run = trained()
        with pytest.raises(RuntimeError, match="restart_warmup"):
            write(run.optimizer, run.params[0])
            step(run, 9, 0)
    run = trained(2)
    entries = run.optimizer.state[run.params[0]]
    entries.update(exp_avg=torch.zeros(4, 5), exp_avg_sq=torch.zeros(4, 5))
    saved = run.optimizer.state_dict()["state"][0]
    assert not saved["exp_avg"].any() and not saved["exp_avg_sq"].any()


@pytest.mark.report("F10", "F14")
def test_entries_are_a_mapping_after_the_freeze_too():
    run = trained()
    entries = run.optimizer.state[run.params[0]]
    assert "exp_avg" in entries and entries.get("exp_avg") is not None
    assert {*entries} == {*run.optimizer.state_dict()["state"][0]} and len(entries) == len(
        [*entries]
    )
    copied = list(copy.deepcopy(run.optimizer.state).values())[0]
    assert type(copied) is dict and torch.equal(copied["exp_avg"], entries["exp_avg"])
    run.optimizer.state[run.params[0]] = type(entries)({name: x for name, x in entries.items()})
    step(run, 9, 0)


@pytest.mark.report("F14")
def test_wrappers_may_pass_their_own_groups_and_keywords():
    class Sam(torch.optim.Optimizer):
        def __init__(self, params, base, **options):
            super().__init__(params, dict(rho=0.05, **options))
            self.base = base(self.param_groups, **options)

    p = torch.nn.Parameter(torch.zeros(3))
    sam = Sam([p], onebit.OneBitAdam, lr=1e-2, warmup=9, communicator=Single())
    p.grad = torch.ones(3)
    sam.base.step()
    assert sam.base.param_groups[0] is sam.param_groups[0] and p[0] < 0
    with pytest.raises(TypeError, match="warmup is an option"):
        onebit.OneBitAdam([{"params": [p], "warmup": 8}], warmup=9, communicator=Single())


def named(names, **options):
    shapes = {"a": (4,), "b": (4,), "x": (4,), "y": (4,)}
    params = {n: torch.nn.Parameter(torch.zeros(shapes[n])) for n in names}
    return params, onebit.DistributedAdam([*params.items()], communicator=Single(), **options)


@pytest.mark.report("P05", "F03")
def test_names_match_parameters_or_are_taken_over():
    params, optimizer = named("ab")
    params["a"].grad, params["b"].grad = torch.ones(4), 10 * torch.ones(4)
    optimizer.step()
    state = optimizer.state_dict()
    reordered, other = named("ba")
    other.load_state_dict(state)
    assert torch.equal(
        other.state[reordered["b"]]["exp_avg"], optimizer.state[params["b"]]["exp_avg"]
    )
    _, renamed = named("xy")
    renamed.load_state_dict(state)
    assert renamed.param_groups[0]["param_names"] == ["a", "b"]
    with pytest.raises(ValueError, match="names"):
        named("bx")[1].load_state_dict(state)


@pytest.mark.report("P06")
def test_what_others_keep_in_the_state_is_saved_and_loaded():
    run = trained()
    run.optimizer.state["mean loss"] = torch.tensor(0.5)
    run.optimizer.state[run.params[0]]["mask"] = torch.ones(3)
    step(run, 9, 0)
    other = make(Single(), warmup=3)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    assert float(other.optimizer.state["mean loss"]) == 0.5
    assert other.optimizer.state[other.params[0]]["mask"].tolist() == [1, 1, 1]
    step(other, 9, 0)


@pytest.mark.report("P07", "P08")
def test_options_and_frozen_parameters_that_cannot_be_are_named():
    p = torch.nn.Parameter(torch.ones(3))
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(ValueError, match=name):
            onebit.DistributedAdam([p], **{name: torch.tensor([0.1, 0.2])}, communicator=Single())
    for frozen in (torch.zeros(3, dtype=torch.uint8), torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match="requires_grad=True"):
            frozen = torch.nn.Parameter(frozen, requires_grad=False)
            onebit.DistributedAdam([p, frozen], communicator=Single())
    with pytest.raises(ValueError, match="more than|once"), pytest.warns(UserWarning):
        onebit.DistributedAdam([p, p], communicator=Single())


@pytest.mark.report("F17", "B15")
def test_facts_that_were_lost_in_rebuilding_are_noticed():
    state = trained().optimizer.state_dict()
    for group in state["param_groups"]:
        del group["onebit"]
    with pytest.raises(ValueError, match="lack"):
        make(Single(), warmup=3).optimizer.load_state_dict(state)


@pytest.mark.report("B14", "N3")
@pytest.mark.parametrize("gradient", [None, 0.0, 1e-30])
def test_an_optimizer_that_never_had_a_gradient_says_so_at_the_freeze(gradient):
    run = make(Single(), warmup=3)
    with pytest.warns(UserWarning, match="no coordinate of the compressed parameters"):
        for _ in range(4):
            for p in run.params:
                p.grad = None if gradient is None else torch.full_like(p, gradient)
            run.optimizer.step()


@pytest.mark.report("B14")
def test_masked_coordinates_are_not_advised_what_was_done():
    for floor, expected in ((0.0, "or set variance_floor"), (1e-3, "variance_floor cannot help")):
        assert expected in make(Single(), warmup=3, variance_floor=floor).optimizer.masked_remedy


@pytest.mark.report("P03")
@pytest.mark.parametrize("kind, options", KINDS + [(onebit.LocalSGD, {"tau": 4})])
@pytest.mark.parametrize("steps", [0, 2, 6])
def test_a_full_state_dict_of_torch_loads_after_any_phase(kind, options, steps):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    full = StateDictOptions(full_state_dict=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = kind(model.parameters(), lr=1e-9, communicator=Single(), **options)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    twin = copy.deepcopy(model)
    other = kind(twin.parameters(), communicator=Single(), **options)
    state = get_optimizer_state_dict(model, optimizer, options=full)
    set_optimizer_state_dict(twin, other, state, options=full)
    saved, loaded = (o.state_dict()["state"] for o in (optimizer, other))
    assert all(torch.equal(saved[i][name], loaded[i][name]) for i in saved for name in saved[i])
    assert other.steps == steps


def test_every_name_that_an_optimizer_saves_is_known():
    for kind, options in KINDS:
        run = make(Single(), kind, **options)
        names = {x for entries in run.optimizer.state_dict()["state"].values() for x in entries}
        assert names <= {*TORCHS, *FAMILYS}


@pytest.mark.report("F17")
def test_a_saved_entry_is_as_large_as_its_parameter():
    run = make(Single(), shapes=((1000,), (1000,)), warmup=3)
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict()["state"][1], file)
    assert len(file.getvalue()) < 3 * 4000 + 5000
