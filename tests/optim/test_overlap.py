"""Buckets and overlap change no bit, and whatever would make an overlapped step wrong raises."""

import time

import pytest
import test_behaviour
import torch
from helpers.launch import BACKENDS
from test_behaviour import same

import onebit
from onebit.comm import Single, run_threads
from onebit.optim.bucket import buckets

KINDS = [
    (onebit.OneBitAdam, {"warmup": 6}),
    (onebit.NaiveOneBitAdam, {}),
    (onebit.DistributedAdam, {}),
    (onebit.OneBitLamb, {"warmup": 6, "coefficient_beta": 0.8, "scale": "fused"}),
    (onebit.DistributedSGD, {"momentum": 0.9}),
    (onebit.DoubleSqueeze, {"weight_decay": 0.1}),
    (onebit.EFMomentumSGD, {"weight_decay": 0.1}),
]
SMALL = 0.001  # MB: a bucket for nearly every parameter of `Net`


class Net(torch.nn.Module):
    """Several layers, one of which is not always used."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(17, 17) for _ in range(5))
        self.sometimes = torch.nn.Linear(17, 17)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 4)

    def forward(self, x, everything=True):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.sometimes(x) if everything else x


def make(communicator, kind=onebit.OneBitAdam, compress=True, **options):
    model = Net()
    groups = [
        {"params": model.layers.parameters(), "lr": 1e-2},
        {"params": model.sometimes.parameters(), "lr": 1e-3, "compress": compress},
    ]
    return model, kind(groups, communicator=communicator, **options)


def backward(model, t, rank, scale=1.0, **options):
    x = scale * torch.randn(8, 17, generator=torch.Generator().manual_seed(100 * t + rank))
    (model(x, **options) - 1).square().mean().backward()


def everything(model, optimizer):
    return test_behaviour.everything(test_behaviour.Run(list(model.parameters()), optimizer))


def train(communicator, kind, options, compress=True, steps=16):
    model, optimizer = make(communicator, kind, compress, **options)
    history = []
    for t in range(steps):
        if t == 13:
            optimizer.restart_warmup(1)
        broken = t == 9 and communicator.rank == communicator.size - 1
        backward(
            model,
            t,
            communicator.rank,
            float("nan") if broken else 1.0,
            everything=(t + communicator.rank) % 3 != 0,
        )
        optimizer.step()
        optimizer.zero_grad()
        traffic = optimizer.communication.last_step
        traffic = (
            None if optimizer.last_step_skipped else (traffic.bytes_sent, traffic.calls)
        )  # with overlap, the buckets have left by then
        history.append(
            (everything(model, optimizer), optimizer.phase, optimizer.last_step_skipped, traffic)
        )
    return history


def assert_same_history(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a[1:] == b[1:] and same(a[0], b[0])


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_overlap_gives_the_bits_of_the_same_buckets_without_it(kind, options, compress, size):
    """Across the freeze, with a parameter that not every rank uses, a skipped step and a new warm-up; the same bytes and calls, too."""
    options = {**options, "bucket_cap_mb": SMALL}
    without = run_threads(size, lambda c: train(c, kind, options, compress))
    overlapped = run_threads(size, lambda c: train(c, kind, {**options, "overlap": True}, compress))
    for ours, theirs in zip(overlapped, without):
        assert_same_history(ours, theirs)
        assert [skipped for _, _, skipped, _ in ours] == [t == 9 for t in range(16)]


def test_buckets_of_exact_groups_give_the_bits_of_one_bucket():
    """An exact average has no scale that a bucket's edge could change."""
    one = run_threads(2, lambda c: train(c, onebit.DistributedAdam, {}))
    several = run_threads(2, lambda c: train(c, onebit.DistributedAdam, {"bucket_cap_mb": SMALL}))
    for ours, theirs in zip(one, several):
        assert all(same(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_overlap_over_processes_equals_threads_bit_for_bit(backend):
    expected = run_threads(2, overlapped)
    for ours, theirs in zip(BACKENDS[backend](2, overlapped, timeout=100), expected):
        assert_same_history(ours, theirs)


def overlapped(communicator):
    return train(
        communicator, onebit.OneBitAdam, {"warmup": 6, "bucket_cap_mb": SMALL, "overlap": True}
    )


def test_the_users_own_collectives_may_come_between_backward_and_step():
    assert all(BACKENDS["gloo"](2, with_collectives_of_ones_own, timeout=100))


def with_collectives_of_ones_own(communicator):
    model, optimizer = make(communicator, warmup=3, bucket_cap_mb=SMALL, overlap=True)
    for t in range(20):
        backward(model, t, communicator.rank)
        loss = torch.tensor([float(communicator.rank)])
        torch.distributed.all_reduce(loss)
        assert loss == 1
        optimizer.step()
        optimizer.zero_grad()
    return True


def test_buckets_leave_during_backward_last_parameters_first():
    """Seen from hooks on the gradients: when the first layer's gradient is made, the last buckets have left."""
    model, optimizer = make(Single(), warmup=2, bucket_cap_mb=SMALL, overlap=True)
    left = []
    model.layers[0].weight.register_hook(lambda g: left.append(len(optimizer._run.overlap._started)))
    for t in range(4):
        backward(model, t, 0)
        optimizer.step()
        optimizer.zero_grad()
    parts = len(optimizer._run.buckets)
    assert parts >= 6 and left[0] == 0 and all(parts - 3 <= count < parts for count in left[1:])


def test_an_exchange_runs_while_backward_goes_on():
    """Rank 1 is late with its first buckets; rank 0 has meanwhile finished backward, without waiting for it."""

    def run(communicator):
        model, optimizer = make(communicator, warmup=1, bucket_cap_mb=SMALL, overlap=True)
        backward(model, 0, communicator.rank)
        optimizer.step()
        optimizer.zero_grad()
        if communicator.rank == 1:
            time.sleep(0.5)
        begin = time.monotonic()
        backward(model, 1, communicator.rank)
        took = time.monotonic() - begin
        optimizer.step()
        return took

    assert run_threads(2, run)[0] < 0.4


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_inside_no_sync_equals_the_sum_of_the_gradients(overlap):
    """Powers of two, so that the sums are exact: two backward passes of half the loss each."""

    def run(communicator, parts):
        model, optimizer = make(communicator, warmup=4, bucket_cap_mb=SMALL, overlap=overlap)
        for t in range(8):
            for part in range(parts):
                if part < parts - 1:
                    with optimizer.no_sync():
                        (sum((p * (t + 1)).sum() for p in model.parameters()) / parts).backward()
                else:
                    (sum((p * (t + 1)).sum() for p in model.parameters()) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    for whole, halves in zip(
        run_threads(2, lambda c: run(c, 1)), run_threads(2, lambda c: run(c, 2))
    ):
        assert same(whole, halves)


def test_after_no_sync_buckets_leave_early_again():
    model, optimizer = make(Single(), warmup=1, bucket_cap_mb=SMALL, overlap=True)
    for t in range(3):
        with optimizer.no_sync():
            backward(model, t, 0)
        assert not optimizer._run.overlap.is_under_way
        backward(model, t, 0)
        assert optimizer._run.overlap.is_under_way == (t > 0)
        optimizer.step()
        optimizer.zero_grad()


# ---- what would be wrong raises


def one_step(**options):
    model, optimizer = make(Single(), warmup=1, bucket_cap_mb=SMALL, overlap=True, **options)
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
    before = everything(model, optimizer)
    change(model)
    with pytest.raises(RuntimeError, match="changed after its bucket had left"):
        optimizer.step()
    assert same(before, everything(model, optimizer))


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
    for kind, options in KINDS:
        with pytest.raises(ValueError, match="max_grad_norm=None, or overlap=False"):
            make(Single(), kind, overlap=True, max_grad_norm=1.0, **options)
    with pytest.raises(ValueError, match="overlap must be True or False"):
        make(Single(), warmup=3, overlap=1)
    with pytest.raises(ValueError, match="bucket_cap_mb must"):
        make(Single(), warmup=3, bucket_cap_mb=0)


def test_an_error_in_the_background_is_raised_by_step():
    def run(communicator):
        model, optimizer = make(communicator, warmup=1, bucket_cap_mb=SMALL, overlap=True)
        backward(model, 0, communicator.rank)
        optimizer.step()
        if communicator.rank == 1:
            raise KeyError("rank 1 has failed")
        optimizer.zero_grad()
        backward(model, 1, communicator.rank)
        with pytest.raises(RuntimeError, match="failed or did not come"):
            optimizer.step()

    with pytest.raises(KeyError, match="rank 1 has failed"):
        run_threads(2, run, timeout=20)


def test_a_dropped_optimizer_leaves_its_parameters_alone():
    model, optimizer = one_step()
    del optimizer
    backward(model, 2, 0)


def test_a_state_saved_with_other_buckets_is_refused_with_the_remedy():
    model, optimizer = one_step()
    optimizer.step()
    for cap in (SMALL, None):
        other_model, other = make(Single(), warmup=1, bucket_cap_mb=cap)
        other_model.load_state_dict(model.state_dict())
        if cap:
            other.load_state_dict(optimizer.state_dict())
            assert same(everything(model, optimizer), everything(other_model, other))
        else:
            with pytest.raises(ValueError, match="bucket_cap_mb.*synchronize.*reset_errors"):
                other.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    other.load_state_dict(optimizer.state_dict())


def test_buckets_hold_whole_parameters_up_to_their_cap_from_the_last_to_the_first():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 300, 20, 30, 5)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    sizes = lambda cap: [
        [[len(p) for p in some] for _, some in bucket] for bucket in buckets(groups, cap)
    ]  # noqa: E731
    assert sizes(None) == [[[10, 300], [20, 30, 5]]]
    assert sizes(4 * 60) == [[[20, 30, 5]], [[300]], [[10]]]
    assert sizes(4 * 320) == [[[20, 30, 5]], [[10, 300]]]
    assert sizes(1) == [[[5]], [[30]], [[20]], [[300]], [[10]]]


@pytest.mark.parametrize("frozen_at_first", [True, False])
def test_layers_may_be_frozen_and_thawed_between_steps(frozen_at_first):
    """The same bits as without overlap; a bucket that cannot begin during backward begins in step()."""

    def run(communicator, overlap):
        model = Net()
        model.layers[2].requires_grad_(not frozen_at_first)
        optimizer = onebit.OneBitAdam(
            model.parameters(),
            warmup=8,
            bucket_cap_mb=SMALL,
            overlap=overlap,
            communicator=communicator,
        )
        for t in range(12):
            if t == 2:
                model.layers[2].requires_grad_(frozen_at_first)
            if t == 4:
                model.layers[2].requires_grad_(True)
            backward(model, t, communicator.rank)
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    for ours, theirs in zip(
        run_threads(2, lambda c: run(c, True)), run_threads(2, lambda c: run(c, False))
    ):
        assert same(ours, theirs)


def test_compress_may_change_between_steps_of_the_warmup():
    model, optimizer = make(Single(), warmup=8, bucket_cap_mb=SMALL, overlap=True)
    for t in range(12):
        optimizer.param_groups[1]["compress"] = t < 4
        backward(model, t, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert [part.compress for part in optimizer._run.buckets].count(
        False
    ) == 2 and optimizer.phase == "compressed"


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
