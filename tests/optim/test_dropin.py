"""Into loops that exist: DistributedDataParallel, GradScaler, torch.compile, torch's own states; what cannot be is refused with the reason."""

import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers.launch import BACKENDS
from test_behaviour import everything, make, same, step
from test_overlap import Net, backward
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import onebit
from onebit.comm import Single, run_threads

KINDS = [
    (onebit.OneBitAdam, {"warmup": 4}),
    (onebit.NaiveOneBitAdam, {}),
    (onebit.DistributedAdam, {}),
    (onebit.ZeroOneAdam, {"variance_freeze_step": 4}),
    (onebit.Lamb, {}),
    (onebit.OneBitLamb, {"warmup": 4}),
    (onebit.DistributedSGD, {"momentum": 0.9}),
    (onebit.DoubleSqueeze, {}),
    (onebit.EFMomentumSGD, {}),
    (onebit.LocalSGD, {"tau": 1}),
    (onebit.LazyVarianceAdam, {}),
    (onebit.QuantizedVarianceAdam, {}),
]


def state_of(model, optimizer):
    return everything(type("Run", (), {"params": list(model.parameters()), "optimizer": optimizer}))


def scenarios(communicator):
    return {
        f.__name__: f(communicator)
        for f in (
            counted,
            batchnorm_statistics,
            ddp_refusals,
            attached_and_not,
            compiled_everywhere,
            sharded,
            from_adamw,
        )
    }


@pytest.fixture(scope="module")
def on_two_ranks():
    """What each scenario gives on both ranks: one launch for all, since it takes seconds."""
    first, second = BACKENDS["gloo"](2, scenarios, timeout=100)
    return {name: [first[name], second[name]] for name in first}


# ---- DistributedDataParallel

DDP_OPTIONS = [
    {},
    {"static_graph": True},
    {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
]


def train_in(communicator, ddp, passes=1, dtype=torch.float32, **options):
    """8 steps across the freeze; `passes` backward passes a step, all but the last under no_sync. ddp: its options; None: without it."""
    unused = bool(ddp and ddp.get("find_unused_parameters")) or options.pop("unused", False)
    model = Net().to(dtype)
    optimizer = onebit.OneBitAdam(
        model.named_parameters(), warmup=4, communicator=communicator, **options
    )
    net = model if ddp is None else DistributedDataParallel(model, **ddp)
    if ddp is not None:
        onebit.ddp.attach(net, optimizer)
    history = []
    for t in range(8):
        for i in range(passes):
            x = torch.randn(
                8, 17, generator=torch.Generator().manual_seed(100 * t + 10 * i + communicator.rank)
            ).to(dtype)
            with net.no_sync() if ddp is not None and i < passes - 1 else nullcontext():
                (
                    net(x, everything=not unused or (t + communicator.rank) % 3 != 0) - 1
                ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(
            (
                state_of(model, optimizer),
                optimizer.phase,
                optimizer.communication.last_step.bytes_sent,
            )
        )
    return history


def assert_attached_equals_plain(communicator):
    plain = {}
    for ddp in DDP_OPTIONS:
        for passes in (
            (1,) if "static_graph" in ddp else (1, 2)
        ):  # no_sync in its first iteration is an internal error of torch's
            for name, options in (
                ("clipped", {"max_grad_norm": 0.1}),
                ("bfloat16", {"dtype": torch.bfloat16}),
            ):
                attached = train_in(communicator, ddp, passes, **options)
                unused = "find_unused_parameters" in ddp
                if (passes, name, unused) not in plain:
                    plain[passes, name, unused] = train_in(
                        communicator, None, passes, unused=unused, **options
                    )
                for ours, theirs in zip(attached, plain[passes, name, unused], strict=True):
                    assert ours[1:] == theirs[1:] and same(ours[0], theirs[0]), (ddp, passes, name)
    return [phase for _, phase, _ in attached]


@pytest.mark.parametrize("size", [2, 3])
def test_an_attached_model_trains_bit_for_bit_like_a_plain_one(size):
    """In both phases, with accumulation under no_sync, gradients in buckets, parameters that some rank does not use, bfloat16."""
    for phases in BACKENDS["gloo"](size, assert_attached_equals_plain, timeout=100):
        assert phases == ["warmup"] * 3 + ["compressed"] * 5


def all_reduces_in_backward(communicator, attached):
    """How many all_reduces of any library happen in one backward pass, and whether its gradients are this rank's own."""
    model = Net()
    optimizer = onebit.OneBitAdam(model.parameters(), warmup=4, communicator=communicator)
    net = DistributedDataParallel(model)
    if attached:
        onebit.ddp.attach(net, optimizer)
    alone = Net()
    for t in range(3):  # buckets are built anew after the first
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            backward(net, t, communicator.rank)
        backward(alone, t, communicator.rank)
    local = all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters()))
    return sum("all_reduce" in event.name for event in profiled.events()), local


def test_nothing_is_all_reduced_in_backward(on_two_ranks):
    for (with_attach, local), (without, averaged) in on_two_ranks["counted"]:
        assert with_attach == 0 and local
        assert without > 0 and not averaged


def counted(communicator):
    return [all_reduces_in_backward(communicator, attached) for attached in (True, False)]


def batchnorm_statistics(communicator):
    """The running mean that each rank ends with, without DistributedDataParallel and with it."""
    means = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = onebit.OneBitAdam(model.parameters(), warmup=2, communicator=communicator)
        net = model
        if wrap:
            net = DistributedDataParallel(model)
            onebit.ddp.attach(net, optimizer)
        for t in range(5):
            net(
                torch.randn(
                    8, 3, generator=torch.Generator().manual_seed(10 * t + communicator.rank)
                )
                + communicator.rank
            ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()(torch.zeros(8, 3))
        means.append(model[1].running_mean.clone())
    return means


def test_batchnorm_statistics_are_each_ranks_own_without_ddp_and_rank_0s_with_it(on_two_ranks):
    (own_0, shared_0), (own_1, shared_1) = on_two_ranks["batchnorm_statistics"]
    assert (
        torch.equal(own_0, shared_0)
        and torch.equal(shared_0, shared_1)
        and not torch.equal(own_0, own_1)
    )


def refusal(call, *args, **options):
    """The kind and text of the error that a call ends in; None: it does not."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ddp_refusals(communicator):
    """In the order of REFUSALS: what attach says. Then twice None, as what is right is taken."""

    def fresh(model, **options):
        return onebit.OneBitAdam(model.parameters(), warmup=2, **options)

    model = DistributedDataParallel(Net())
    alone = torch.distributed.new_group([communicator.rank], use_local_synchronization=True)
    optimizer = fresh(model)
    frozen = Net()
    frozen.sometimes.requires_grad_(False)
    return [
        refusal(onebit.ddp.attach, *pair)
        for pair in (
            (Net(), fresh(Net())),
            (model, torch.optim.AdamW(model.parameters())),
            (model, fresh(model, overlap=True)),
            (model, fresh(model, communicator=Single())),
            (model, fresh(model, communicator=onebit.comm.TorchDistributed(alone))),
            (model, onebit.OneBitAdam(model.module.layers.parameters(), warmup=2)),
            (model, optimizer),  # no refusal has left a hook behind
            (model, optimizer),
            (DistributedDataParallel(model.module), optimizer),  # the remedy
            (DistributedDataParallel(frozen), fresh(frozen.layers)),
        )
    ]


REFUSALS = [
    "TypeError: attach takes a DistributedDataParallel, not Net.*broadcast_parameters",
    "TypeError: .*not AdamW",
    "ValueError: .*overlap=False",
    r"ValueError: .*TorchDistributed\(ddp_model.process_group\)",
    r"ValueError: .*has ranks \[0, 1\]",
    "ValueError: .*does not have sometimes.weight.*compress=False",
    None,
    r"RuntimeError: .*DistributedDataParallel\(ddp_model.module\)",
    None,
    None,
]


def matches(found, expected):
    return (
        found == expected
        if expected is None or found is None
        else re.search(expected, found) is not None
    )


def test_what_attach_cannot_serve_is_refused_with_the_remedy(on_two_ranks):
    for found in on_two_ranks["ddp_refusals"]:
        assert [
            found[i] for i, expected in enumerate(REFUSALS) if not matches(found[i], expected)
        ] == [] and len(found) == len(REFUSALS)


def forgotten(communicator, attached):
    model = Net()
    net = DistributedDataParallel(model)
    optimizer = onebit.OneBitAdam(model.parameters(), warmup=2, communicator=communicator)
    if attached:
        onebit.ddp.attach(net, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(6):
            backward(net, t, communicator.rank)
            optimizer.step()
            optimizer.zero_grad()
    return sum("onebit.ddp.attach" in str(w.message) for w in caught)


def attached_and_not(communicator):
    return forgotten(communicator, True), forgotten(communicator, False)


def test_a_forgotten_attach_is_warned_of_once(on_two_ranks):
    assert on_two_ranks["attached_and_not"] == [(0, 1), (0, 0)]


# ---- torch.amp.GradScaler


def scaled_step(run, t, communicator, scaler, unscale=False, overflow=False):
    """As `step`, with the gradients that a loss times the scale would give."""
    generator = torch.Generator().manual_seed(1000 * t + communicator.rank)
    for p in run.params:
        p.grad = scaler.scale(torch.randn(p.shape, generator=generator)).to(p.dtype)
    if overflow:
        run.params[0].grad.view(-1)[0] = torch.inf
    if unscale:
        scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)
    scaler.update()


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize(
    "max_grad_norm, check_finite, unscale",
    [(None, True, False), (1.0, True, False), (None, False, False), (1.0, True, True)],
)
def test_a_grad_scaler_changes_no_bit(kind, options, max_grad_norm, check_finite, unscale):
    """Scales are powers of two, another one on each rank; clipping is by the norm of the unscaled gradients."""
    options = {"max_grad_norm": max_grad_norm, "check_finite": check_finite, **options}

    def run(communicator):
        plain, scaled = (make(communicator, kind, ((4, 5), (9,)), **options) for _ in range(2))
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0 ** (10 + communicator.rank), growth_interval=3
        )
        for t in range(10):
            step(plain, t, communicator.rank)
            scaled_step(scaled, t, communicator, scaler, unscale)
            assert (
                same(everything(plain), everything(scaled))
                and not scaled.optimizer.last_step_skipped
            )
        return scaler.get_scale()

    assert run_threads(2, run) == [2.0**13, 2.0**14]


def test_an_overflow_between_syncs_counts_as_a_zero_gradient_of_its_rank_alone():
    """0/1 Adam's local steps ask nobody."""

    def run(communicator):
        options = {"variance_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
        zero, scaled = (make(communicator, onebit.ZeroOneAdam, **options) for _ in range(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for t in range(16):
            overflow = communicator.rank == 1 and t == 9
            scaled_step(scaled, t, communicator, scaler, overflow=overflow)
            step(zero, t, communicator.rank, scale=0.0 if overflow else 1.0)
            assert same(everything(zero), everything(scaled))
            calls = scaled.optimizer.communication.last_step.calls
            assert calls == 0 or t != 9
        return scaler.get_scale()

    assert run_threads(2, run) == [1024.0, 512.0]


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize("check_finite, unscale", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("at", [2, 7])
def test_one_ranks_overflow_makes_all_ranks_skip_and_only_its_scale_fall(
    kind, options, check_finite, unscale, at
):
    """What follows equals, bit for bit, the run in which that step was never tried."""

    def run(communicator):
        without, scaled = (
            make(communicator, kind, check_finite=check_finite, **options) for _ in range(2)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for t in range(10):
            overflow = communicator.rank == 1 and t == at
            scaled_step(scaled, t, communicator, scaler, unscale, overflow)
            assert scaled.optimizer.last_step_skipped == (t == at)
            if t != at:
                step(without, t, communicator.rank)
            assert same(everything(scaled), everything(without))
        return scaler.get_scale(), [p.detach() for p in scaled.params]

    (scale_0, params_0), (scale_1, params_1), (scale_2, params_2) = run_threads(3, run)
    assert (
        (scale_0, scale_1, scale_2) == (1024.0, 512.0, 1024.0)
        and same(params_0, params_1)
        and same(params_0, params_2)
    )


@pytest.mark.parametrize("at", [2, 7])
def test_what_the_scaler_has_found_counts_even_if_it_was_mended_since(at):
    """After unscale_ a user may put 0 where the inf was; torch skips all the same, and so do all ranks here."""

    def run(communicator):
        run = make(communicator, warmup=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t in range(at):
            scaled_step(run, t, communicator, scaler)
        for p in run.params:
            p.grad = torch.ones_like(p)
        if communicator.rank == 1:
            run.params[0].grad[0] = torch.inf
        scaler.scale(torch.ones(()))
        scaler.unscale_(run.optimizer)
        for p in run.params:
            p.grad.nan_to_num_(posinf=0.0)
        before = everything(run)
        scaler.step(run.optimizer)
        return run.optimizer.last_step_skipped and same(before, everything(run))

    assert run_threads(2, run) == [True, True]


def test_scales_are_kept_alike_by_the_public_update():
    """scaler.update(new_scale) backs off on all ranks if the step was skipped on all."""

    def run(communicator):
        run = make(communicator, warmup=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        for t in range(12):
            for p in run.params:
                p.grad = scaler.scale(torch.ones_like(p))
            if t == 5 and communicator.rank == 1:
                run.params[0].grad[0] = torch.nan
            scaler.step(run.optimizer)
            scaler.update(
                scaler.get_scale() * scaler.get_backoff_factor()
                if run.optimizer.last_step_skipped
                else None
            )
        return scaler.get_scale()

    scales = run_threads(3, run)
    assert len(set(scales)) == 1 and scales[0] == 1024.0 * 2 * 2 / 2


def test_float16_gradients_keep_what_the_scale_was_for():
    """1e-8 is 0 in float16; times 2^16 it is not, and it stays so on the wire once the scale is out."""

    def run(communicator):
        run = make(communicator, dtype=torch.float16, betas=(0.0, 0.5), warmup=100)
        scaler = torch.amp.GradScaler("cpu")
        scale = scaler.scale(torch.ones(()))
        for p in run.params:
            p.grad = (1e-8 * scale).expand(p.shape).half()
        scaler.step(run.optimizer)
        return [run.optimizer.state[p]["exp_avg"] for p in run.params]

    for moments in run_threads(2, run):
        for m in moments:
            torch.testing.assert_close(m, torch.full_like(m, 1e-8), rtol=1e-3, atol=0)


def test_autocast_training_with_overflows_keeps_all_ranks_alike():
    """float16 forward and backward; the scale starts far too high and rank 1's gradients are a thousand times larger."""

    def run(communicator):
        model = torch.nn.Linear(16, 1)
        onebit.broadcast_parameters(model, communicator)
        optimizer = onebit.OneBitAdam(
            model.parameters(), lr=0.05, warmup=10, betas=(0.9, 0.9), communicator=communicator
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
        losses, skipped = [], 0
        for t in range(60):
            x = torch.randn(
                8, 16, generator=torch.Generator().manual_seed(10 * t + communicator.rank)
            )
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(x) - x.sum(1, keepdim=True)).float().square().mean()
            scaler.scale(loss * (1000 if communicator.rank else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += optimizer.last_step_skipped
            losses.append(loss.item())
        return (
            losses,
            skipped,
            optimizer.steps,
            scaler.get_scale(),
            [p.detach() for p in model.parameters()],
        )

    ours, theirs = run_threads(2, run)
    assert (
        ours[1] == theirs[1] > 3
        and ours[2] == 60 - ours[1]
        and ours[3] > theirs[3]
        and same(ours[4], theirs[4])
    )
    assert sum(ours[0][-5:]) < 0.5 * sum(ours[0][:5])


def test_a_grad_scaler_on_some_ranks_only_raises_on_all():
    def run(communicator):
        run = make(communicator, warmup=4)
        scaler = torch.amp.GradScaler("cpu", enabled=communicator.rank == 1)
        with pytest.raises(
            RuntimeError, match="without a GradScaler; rank 1 has .*with a GradScaler"
        ):
            scaled_step(run, 0, communicator, scaler)
        return True

    assert run_threads(2, run) == [True, True]


def test_a_grad_scaler_with_overlap_is_refused_with_the_reason():
    run = make(Single(), warmup=4, overlap=True)
    with pytest.raises(RuntimeError, match="leaves during backward.*overlap=False"):
        scaled_step(run, 0, Single(), torch.amp.GradScaler("cpu"))


# ---- torch.compile


def compiled_and_plain(communicator, overlap, wrap):
    """The same model, run by the same backend or as it is; the parameters and all state after each of 8 steps."""
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


def test_a_compiled_model_trains_bit_for_bit_like_the_plain_one(on_two_ranks):
    """aot_eager traces the model and changes no arithmetic; with overlap, or within DistributedDataParallel."""
    first, second = on_two_ranks["compiled_everywhere"]
    for ours, theirs in zip(first, second):
        assert ours[-1] == theirs[-1] == "compressed" and same(
            ours[:12], theirs[:12]
        )  # 12 parameters, then state


def test_ranks_of_which_one_is_compiled_are_told_apart_by_their_parameters_own_names():
    def run(communicator):
        model = torch.nn.Linear(3, 4 + communicator.rank)
        model = torch.compile(model, backend="eager") if communicator.rank else model
        with pytest.raises(RuntimeError, match="rank 0 has weight: .*; rank 1 has weight: "):
            onebit.broadcast_parameters(model, communicator)
        return True

    assert run_threads(2, run) == [True, True]


# ---- sharded parameters


def sharded(communicator):
    """What a user of each kind of sharding would give to the optimizer: a message for each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (communicator.size,))
    cpu = torch.device("cpu")
    of_deepspeed = torch.nn.Parameter(torch.ones(2))
    of_deepspeed.ds_id = 0  # DeepSpeed ZeRO-3 leaves this mark on what it has sharded
    params = {
        "DTensor": [torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))],
        "fully_shard": fully_shard(torch.nn.Linear(4, 4), mesh=mesh).parameters(),
        "FullyShardedDataParallel": FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=cpu
        ).parameters(),
        "FullyShardedDataParallel's": FullyShardedDataParallel(
            torch.nn.Linear(4, 4), device_id=cpu, use_orig_params=True
        ).parameters(),
        "DeepSpeed ZeRO-3": [of_deepspeed],
    }
    params = {name: list(tensors) for name, tensors in params.items()}
    return [
        (name, refusal(kind, tensors, **options))
        for name, tensors in params.items()
        for kind, options in KINDS
    ]


def test_sharded_parameters_are_refused_with_the_reason(on_two_ranks):
    for found in on_two_ranks["sharded"]:
        assert [
            name
            for name, text in found
            if not matches(
                text, f"ValueError: .*{name}.*each rank holds only a shard.*onebit.ddp.attach"
            )
        ] == []
        assert len(found) == 5 * len(KINDS)


# ---- states of torch's own optimizers


def torch_state(kind, **options):
    params = [torch.nn.Parameter(torch.ones(s)) for s in ((4, 5), (9,))]
    optimizer = kind(params, lr=0.3, **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    return optimizer.state_dict()


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


def test_adamws_state_goes_on_in_an_attached_model(on_two_ranks):
    assert on_two_ranks["from_adamw"] == [True, True]


def from_adamw(communicator):
    """3 steps of AdamW in DistributedDataParallel, then OneBitAdam with its state: 3 more equal AdamW's own, and then it freezes."""
    histories = []
    for goes_on in (False, True):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        net = DistributedDataParallel(model)
        for t in range(8):
            if t == 3 and goes_on:
                state = optimizer.state_dict()
                optimizer = onebit.OneBitAdam(model.parameters(), warmup=6)
                net = DistributedDataParallel(model)
                onebit.ddp.attach(net, optimizer)
                optimizer.load_state_dict(state)
            backward(net, t, communicator.rank)
            optimizer.step()
            optimizer.zero_grad()
            histories.append([p.detach().clone() for p in model.parameters()])
    for theirs, ours in zip(histories[:6], histories[8:14]):
        for p, q in zip(theirs, ours):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    return optimizer.phase == "compressed" and optimizer.steps == 8


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (
            torch.optim.SGD,
            {"momentum": 0.9},
            "momentum_buffer for a parameter, and lacks exp_avg, exp_avg_sq",
        ),
        (torch.optim.RMSprop, {}, "lacks exp_avg"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True"),
    ],
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
