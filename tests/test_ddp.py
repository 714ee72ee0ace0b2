"""A model in DistributedDataParallel with onebit.ddp.attach: its gradients stay local, and it
trains like a plain model.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers.cases import more
from helpers.launch import BACKENDS, run_gloo
from helpers.nets import Net, backward, state_of
from helpers.refusals import matches, refusal
from helpers.small_runs import same
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import onebit
from onebit.comm import Single

DDP_OPTIONS = [
    {},
    {"static_graph": True},
    {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
]


def train_in(communicator, ddp, passes=1, dtype=torch.float32, **options):
    """8 steps across the freeze; `passes` backward passes a step, all but the last under
    no_sync.

    ddp: its options; None: without it.
    """
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
                    net(x, use_all=not unused or (t + communicator.rank) % 3 != 0) - 1
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


@pytest.mark.report("R62")
@pytest.mark.parametrize("size", [2, *more(3)])
def test_an_attached_model_trains_bit_for_bit_like_a_plain_one(size):
    """In both phases, with accumulation under no_sync, gradients in buckets, parameters that
    some rank does not use, bfloat16.
    """
    for phases in BACKENDS["gloo"](size, assert_attached_equals_plain):
        assert phases == ["warmup"] * 3 + ["compressed"] * 5


def all_reduces_in_backward(communicator, attached):
    """How many all_reduces of any library happen in one backward pass, and whether its
    gradients are this rank's own.
    """
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


def test_nothing_is_all_reduced_in_backward():
    for (with_attach, local), (without, averaged) in run_gloo(2, counted):
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


def test_batchnorm_statistics_are_each_ranks_own_without_ddp_and_rank_0s_with_it():
    (own_0, shared_0), (own_1, shared_1) = run_gloo(2, batchnorm_statistics)
    assert (
        torch.equal(own_0, shared_0)
        and torch.equal(shared_0, shared_1)
        and not torch.equal(own_0, own_1)
    )


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


def test_what_attach_cannot_serve_is_refused_with_the_remedy():
    for found in run_gloo(2, ddp_refusals):
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


@pytest.mark.report("N4")
def test_a_forgotten_attach_is_warned_of_once():
    assert run_gloo(2, attached_and_not) == [(0, 1), (0, 0)]


def test_adamws_state_goes_on_in_an_attached_model():
    assert run_gloo(2, from_adamw) == [True, True]


def from_adamw(communicator):
    """3 steps of AdamW in DistributedDataParallel, then OneBitAdam with its state: 3 more equal
    AdamW's own, and then it freezes.
    """
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
