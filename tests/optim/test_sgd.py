"""SGD and its relatives equal their references, state tensor by state tensor, and the identities between them hold."""

import numpy as np
import pytest
import torch
from test_behaviour import everything, make, same, step
from test_checkpoint import SHAPES as SMALL_SHAPES
from test_checkpoint import resumed, saved
from test_optimizers import (
    NUMELS,
    STEPS,
    WORLD_SIZES,
    D,
    gradients_of_all,
    joined,
    learning_rate,
    local_gradient,
    segments,
    server_error,
    split,
    start_values,
    steps_on_the_mean_gradient,
)

import onebit
from onebit import reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity

GROUPS = [  # two parameter groups with options of their own: tensors 0-2 and 3-5
    {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    {"lr": 3e-3, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0},
]
PLAIN = [{"lr": 1e-2, "weight_decay": 0.01}, {"lr": 3e-3, "weight_decay": 0.0}]
UNDECAYED = [{"lr": 1e-2}, {"lr": 3e-3}]
COMPRESSED = [(onebit.DoubleSqueeze, PLAIN), (onebit.EFMomentumSGD, GROUPS)]
ALL = [(onebit.DistributedSGD, GROUPS), *COMPRESSED, (onebit.LocalSGD, GROUPS)]


def train(
    communicator,
    kind,
    groups,
    options=None,
    steps=STEPS,
    dtype=torch.float64,
    gradient=local_gradient,
):
    """Run an optimizer on this rank; return its state after each step, flattened to the reference's vectors."""
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    optimizer = kind(
        [dict(groups[0], params=params[:3]), dict(groups[1], params=params[3:])],
        communicator=communicator,
        **options or {},
    )
    history = []
    for t in range(1, steps + 1):
        for group, own in zip(optimizer.param_groups, groups):
            group["lr"] = learning_rate(own["lr"], t)
        for p, g in zip(params, split(gradient(t, joined(params), communicator.rank))):
            p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        history.append(snapshot(optimizer, params))
    return history


def snapshot(optimizer, params):
    state = {"x": joined(params)}
    entries = [optimizer.state[p] for p in params]
    if optimizer.vectors:
        state["m"] = joined([entry["momentum_buffer"] for entry in entries])
    if optimizer.has_errors:
        state["delta"] = joined([entry["worker_error"] for entry in entries])
        state["server_error"] = entries[0]["server_error"].double().numpy().copy()
    return state


def reference_options(groups):
    """The groups' options for each coordinate."""
    options = {
        name: np.repeat([float(groups[0][name])] * 3 + [float(groups[1][name])] * 3, NUMELS)
        for name in groups[0]
    }
    lr = options.pop("lr")
    return options | {"gamma": lambda t: learning_rate(lr, t)}


def assert_equals_reference(history, generator):
    ranks = len(history)
    for t, expected in zip(range(len(history[0])), generator):
        for rank in range(ranks):
            close = dict(rtol=1e-9, atol=1e-12, err_msg=f"step {t + 1}, rank {rank}")
            for name in history[rank][t].keys() - {"server_error"}:
                value = getattr(expected, name)
                np.testing.assert_allclose(
                    history[rank][t][name], value[rank] if value.ndim == 2 else value, **close
                )
        if "delta" in history[0][t]:
            np.testing.assert_allclose(
                server_error(history, t, ranks), expected.delta_bar, rtol=1e-9, atol=1e-12
            )


# ---- each equals its reference


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_sgd_equals_its_reference(ranks, max_norm):
    history = run_threads(
        ranks, lambda c: train(c, onebit.DistributedSGD, GROUPS, {"max_grad_norm": max_norm})
    )
    assert_equals_reference(
        history,
        reference.sgd(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            **reference_options(GROUPS),
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "kind, groups, algorithm",
    [
        (onebit.DoubleSqueeze, PLAIN, reference.double_squeeze),
        (onebit.EFMomentumSGD, GROUPS, reference.ef_momentum_sgd),
    ],
)
@pytest.mark.parametrize(
    "compressor, C", [(None, reference.one_bit), (Identity, reference.identity)]
)
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_compressed_sgd_equals_its_reference(
    ranks, kind, groups, algorithm, compressor, C, max_norm
):
    history = run_threads(
        ranks,
        lambda c: train(c, kind, groups, {"compressor": compressor, "max_grad_norm": max_norm}),
    )
    assert_equals_reference(
        history,
        algorithm(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            C=C,
            **reference_options(groups),
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("groups", [PLAIN, GROUPS])
@pytest.mark.parametrize("tau", [1, 4])
@pytest.mark.parametrize("max_norm", [None, 5.0])
def test_local_sgd_equals_its_reference(ranks, groups, tau, max_norm):
    """Each rank's own model and momentum, between averages too."""
    history = run_threads(
        ranks, lambda c: train(c, onebit.LocalSGD, groups, {"tau": tau, "max_grad_norm": max_norm})
    )
    assert_equals_reference(
        history,
        reference.local_sgd(
            joined(start_values()),
            lambda t, x: np.stack([local_gradient(t, x[i], i) for i in range(ranks)]),
            ranks,
            tau=tau,
            **reference_options(groups),
            max_norm=max_norm,
        ),
    )


# ---- identities


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_sgd_equals_torch_sgd_on_the_mean_gradient(dtype, max_norm):
    """torch's SGD after DistributedDataParallel sees the mean gradient and clips its norm; the arithmetic is the same."""
    groups = [dict(group, dampening=0.0) for group in GROUPS]
    history = run_threads(
        3,
        lambda c: train(c, onebit.DistributedSGD, groups, {"max_grad_norm": max_norm}, dtype=dtype),
    )
    params = [torch.nn.Parameter(v) for v in start_values(dtype)]
    optimizer = torch.optim.SGD(
        [dict(groups[0], params=params[:3]), dict(groups[1], params=params[3:])]
    )
    for t in steps_on_the_mean_gradient(optimizer, params, groups, dtype, max_norm):
        close = (
            dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
        )
        np.testing.assert_allclose(history[0][t - 1]["x"], joined(params), **close)
        np.testing.assert_allclose(
            history[0][t - 1]["m"],
            joined([optimizer.state[p]["momentum_buffer"] for p in params]),
            **close,
        )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_double_squeeze_with_identity_equals_sgd_bit_for_bit(ranks):
    """Nothing is lost, so both errors stay 0, and both averages add in rank order."""
    squeezed = run_threads(
        ranks,
        lambda c: train(
            c, onebit.DoubleSqueeze, UNDECAYED, {"compressor": Identity}, dtype=torch.float32
        ),
    )
    exact = run_threads(
        ranks, lambda c: train(c, onebit.DistributedSGD, UNDECAYED, dtype=torch.float32)
    )
    for a, b in zip(squeezed[0], exact[0]):
        np.testing.assert_array_equal(a["x"], b["x"])
        assert not a["delta"].any() and not a["server_error"].any()


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_ef_momentum_sgd_with_identity_equals_momentum_sgd(ranks):
    """mean_i (momentum m + g_i) = momentum m + mean_i g_i, to rounding."""
    ours = run_threads(
        ranks, lambda c: train(c, onebit.EFMomentumSGD, GROUPS, {"compressor": Identity})
    )
    exact = run_threads(ranks, lambda c: train(c, onebit.DistributedSGD, GROUPS))
    for a, b in zip(ours[0], exact[0]):
        for name in "xm":
            np.testing.assert_allclose(a[name], b[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("groups", [PLAIN, GROUPS])
def test_local_sgd_that_averages_every_step_equals_sgd(groups):
    """All start from one x and m, and x - lr (momentum m + g_i) is linear in g_i."""
    local = run_threads(3, lambda c: train(c, onebit.LocalSGD, groups, {"tau": 1}))
    exact = run_threads(3, lambda c: train(c, onebit.DistributedSGD, groups))
    for a, b in zip(local[0], exact[0]):
        np.testing.assert_allclose(a["x"], b["x"], rtol=1e-11, atol=1e-12)
        if groups is GROUPS:
            np.testing.assert_allclose(a["m"], b["m"], rtol=1e-11, atol=1e-12)


def test_ef_momentum_sgd_equals_onebit_adam_with_a_variance_of_one_bit_for_bit():
    """dampening = momentum = beta1 makes line 6; v = 1 and eps = 0 leave x - lr m of line 13."""

    def run(communicator, kind, name, **options):
        run = make(communicator, kind, shapes=SMALL_SHAPES, lr=0.01, **options)
        if kind is onebit.OneBitAdam:
            state = saved(run.optimizer)
            for entries in state["state"].values():
                entries["step"] += 1
                entries["exp_avg_sq"] += 1
            run.optimizer.load_state_dict(state)
        history = []
        for t in range(20):
            run.optimizer.param_groups[0]["lr"] = 0.01 / (1 + t)
            step(run, t, communicator.rank)
            entries = run.optimizer.state_dict()["state"].values()
            history.append(
                [p.detach().clone() for p in run.params]
                + [entry[key].clone() for entry in entries for key in (name, "worker_error")]
            )
        return history

    sgd = run_threads(
        3, lambda c: run(c, onebit.EFMomentumSGD, "momentum_buffer", momentum=0.9, dampening=0.9)
    )
    adam = run_threads(
        3,
        lambda c: run(
            c,
            onebit.OneBitAdam,
            "exp_avg",
            betas=(0.9, 0.999),
            eps=0.0,
            warmup=1,
            bias_correction=False,
        ),
    )
    for ours, theirs in zip(sgd, adam):
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        assert ours[-1][4].any()  # a worker error


# ---- laws


def test_the_error_of_double_squeeze_cancels_in_the_sum_of_steps():
    """x_T = x_0 - lr sum_t mean_i g_i + lr (mean_i delta_i + delta_bar): "1-bit Adam", section 4.1."""

    def run(communicator):
        run = make(
            communicator, onebit.DoubleSqueeze, shapes=SMALL_SHAPES, dtype=torch.float64, lr=0.1
        )
        start = [p.detach().clone() for p in run.params]
        total = [torch.zeros_like(p) for p in start]
        for t in range(30):
            step(run, t, communicator.rank)
            total = [a + p.grad for a, p in zip(total, run.params)]
        run.optimizer.synchronize()  # each worker error is now mean_i delta_i + delta_bar
        return (
            start,
            total,
            [p.detach() for p in run.params],
            [run.optimizer.state[p]["worker_error"] for p in run.params],
        )

    results = run_threads(3, run)
    for i, x in enumerate(results[0][2]):
        mean = sum(total[i] for _, total, _, _ in results) / 3
        torch.testing.assert_close(
            x, results[0][0][i] - 0.1 * (mean - results[0][3][i]), rtol=1e-12, atol=1e-12
        )
        assert x.numel() == 0 or results[0][3][i].abs().max() > 0.1


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("kind, groups", ALL)
def test_every_rank_holds_the_same_bits_after_every_step_that_syncs(ranks, kind, groups):
    """And between two averages of local SGD it does not."""
    history = run_threads(ranks, lambda c: train(c, kind, groups, steps=24, dtype=torch.float32))
    for t, (first, *others) in enumerate(zip(*history), 1):
        for state in others:
            for name in state.keys() & {"x", "m"}:
                assert np.array_equal(state[name], first[name]) == (
                    kind is not onebit.LocalSGD or t % 4 == 0
                )


@pytest.mark.parametrize(
    "kind, options, calls, sent",
    [
        (onebit.DistributedSGD, {"momentum": 0.9}, 2, 2 * 3 * 3264 * 4),
        (onebit.DoubleSqueeze, {}, 3, 3 * 16 + 2 * 3 * (3264 // 8 + 3 * 4)),
        (onebit.EFMomentumSGD, {}, 3, 3 * 16 + 2 * 3 * (3264 // 8 + 3 * 4)),
        (onebit.LocalSGD, {"momentum": 0.9}, 1 + 4, 3 * 16 + 2 * 2 * 3 * 3264 * 4),
        (onebit.LocalSGD, {}, 1 + 2, 3 * 16 + 2 * 3 * 3264 * 4),
        (onebit.LocalSGD, {"check_finite": False}, 2, 2 * 3 * 3264 * 4),
    ],
)
def test_bytes_of_a_step_are_those_of_its_exchanges(kind, options, calls, sent):
    """Four chunks of 3264 elements, at most three scales in one; local SGD sends in every fourth step only."""

    def run(communicator):
        run = make(communicator, kind, shapes=((300, 40), (777,)), **options)
        traffic = []
        for t in range(8):
            step(run, t, communicator.rank)
            last = run.optimizer.communication.last_step
            traffic.append((last.calls, last.bytes_sent, last.bytes_received))
        return traffic

    for traffic in run_threads(4, run):
        assert traffic == [
            (calls, sent, sent) if kind is not onebit.LocalSGD or t % 4 == 3 else (0, 0, 0)
            for t in range(8)
        ]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind, groups", ALL)
def test_one_broken_gradient_makes_all_ranks_skip_a_step_that_syncs(kind, groups, bad):
    """Nothing changes, and the next step averages in its place."""

    def run(communicator):
        run = make(communicator, kind, **({"tau": 1} if kind is onebit.LocalSGD else {}))
        for t in range(3):
            step(run, t, communicator.rank)
        before = everything(run)
        step(run, 3, communicator.rank, scale=bad if communicator.rank == 1 else 1.0)
        return same(before, everything(run)), run.optimizer.last_step_skipped, run.optimizer.steps

    assert run_threads(3, run) == [(True, True, 3)] * 3


def test_one_broken_gradient_counts_as_zero_in_a_local_step():
    """On its rank alone, which goes on by its momentum; the others do not notice."""

    def run(communicator, scale):
        run = make(communicator, onebit.LocalSGD, momentum=0.9, dampening=0.1, lr=0.1, tau=10)
        step(run, 0, communicator.rank)
        step(run, 1, communicator.rank, scale=scale if communicator.rank == 1 else 1.0)
        return everything(run), run.optimizer.last_step_skipped, run.optimizer.steps

    broken, zero = (
        run_threads(2, lambda c, scale=scale: run(c, scale)) for scale in (float("nan"), 0.0)
    )
    for ours, theirs in zip(broken, zero):
        assert same(ours[0], theirs[0]) and ours[1:] == theirs[1:] == (False, 2)


@pytest.mark.parametrize("kind, groups", ALL)
def test_an_uncompressed_group_is_trained_by_plain_sgd_exactly(kind, groups):
    """compress=False: averaged exactly at every step; nothing of the other groups leaks in. Bit for bit."""

    def run(communicator, kind, groups, flag):
        params = [torch.nn.Parameter(v) for v in start_values(torch.float32)]
        optimizer = kind(
            [dict(groups[0], params=params[:3]), dict(groups[1], params=params[3:], compress=flag)],
            communicator=communicator,
        )
        for t in range(1, 23):
            for p, g in zip(params, split(local_gradient(t, np.zeros(D), communicator.rank))):
                p.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
        return joined(params[3:]), joined(params[:3])

    exact = run_threads(3, lambda c: run(c, onebit.DistributedSGD, groups, True))
    for mixed, plain in zip(run_threads(3, lambda c: run(c, kind, groups, False)), exact):
        np.testing.assert_array_equal(mixed[0], plain[0])
        assert np.array_equal(mixed[1], plain[1]) == (kind is onebit.DistributedSGD)


# ---- checkpoints between two averages


def local(communicator, steps, **options):
    run = make(communicator, onebit.LocalSGD, shapes=SMALL_SHAPES, momentum=0.9, lr=0.1, **options)
    for t in range(steps):
        step(run, t, communicator.rank)
    return run


def test_another_ranks_own_model_is_refused_with_the_remedy():
    states = run_threads(2, lambda c: saved(local(c, 6).optimizer))

    def load(communicator, size):
        for rank, state in enumerate(states):
            run = make(communicator, onebit.LocalSGD, shapes=SMALL_SHAPES)
            if (rank, 2) == (communicator.rank, size):
                run.optimizer.load_state_dict(state)
            else:
                with pytest.raises(ValueError, match="synchronize.*its own file"):
                    run.optimizer.load_state_dict(state)

    for size in (1, 2):
        run_threads(size, lambda c, size=size: load(c, size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_synchronized_local_checkpoint_serves_any_number_of_ranks(size):
    """It holds the means of the models and of the momenta."""
    apart = run_threads(2, lambda c: everything(local(c, 6)))

    def together(communicator):
        run = local(communicator, 6)
        run.optimizer.synchronize()
        return everything(run), run.params, saved(run.optimizer)

    (ours, params, state), (theirs, _, _) = run_threads(2, together)
    assert same(ours, theirs)
    for a, b, mean in zip(*apart, ours):
        torch.testing.assert_close((a + b) / 2, mean)

    def load(communicator):
        run = resumed(communicator, params, state, kind=onebit.LocalSGD, momentum=0.9, lr=0.1)
        before = everything(run)
        step(run, 6, communicator.rank)
        step(run, 7, communicator.rank)
        return before, everything(run)

    results = run_threads(size, load)
    for before, after in results:
        assert same(before, ours) and same(after, results[0][1])


def test_what_no_rank_has_trained_keeps_its_bits():
    """(x + x + x) / 3 may differ from x: a frozen parameter is left out, one frozen since the last average is not, after a resume either."""

    def run(communicator):
        run = make(communicator, onebit.LocalSGD, shapes=((1000,), (1000,)), lr=0.1)
        run.params[0].requires_grad_(False)
        before = run.params[0].detach().clone()
        for t in range(2):
            step(run, t, communicator.rank)
        run.params[1].requires_grad_(False)
        other = make(communicator, onebit.LocalSGD, shapes=((1000,), (1000,)), lr=0.1)
        other.params[0].requires_grad_(False)
        other.params[1].requires_grad_(False).copy_(run.params[1])
        other.optimizer.load_state_dict(saved(run.optimizer))
        for each in (run, other):
            each.optimizer.synchronize()
        return before, run.params[0], other.params[0], run.params[1], other.params[1]

    results = run_threads(3, run)
    for before, frozen, also_frozen, trained, also_trained in results:
        assert torch.equal(before, frozen) and torch.equal(before, also_frozen)
        assert torch.equal(trained, results[0][3]) and torch.equal(also_trained, trained)


def test_compress_may_change_after_an_average_only():
    run = local(Single(), 6)
    run.optimizer.param_groups[0]["compress"] = False
    with pytest.raises(ValueError, match="synchronize"):
        step(run, 6, 0)
    run.optimizer.synchronize()
    step(run, 6, 0)
    assert run.optimizer.steps == 7


# ---- states of other optimizers


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_loading_torch_sgd_starts_from_its_momentum(momentum):
    """The next step is torch's; without momentum torch has no buffer, or None by that name, and ours starts from zero."""
    params = [torch.nn.Parameter(torch.ones(s)) for s in SMALL_SHAPES]
    sgd = torch.optim.SGD(params, lr=0.3, momentum=momentum)
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    sgd.step()
    run = make(Single(), onebit.DistributedSGD, shapes=SMALL_SHAPES)
    state = sgd.state_dict()
    if not momentum:
        state["state"] = {i: {"momentum_buffer": None} for i in range(len(params))}
    run.optimizer.load_state_dict(state)
    assert (
        run.optimizer.param_groups[0]["momentum"] == momentum
        and "nesterov" not in run.optimizer.param_groups[0]
    )
    with torch.no_grad():
        for p, q in zip(run.params, params):
            p.copy_(q)
            p.grad = q.grad.clone()
    sgd.step()
    run.optimizer.step()
    for p, q in zip(run.params, params):
        torch.testing.assert_close(p, q)


def test_a_state_of_another_kind_is_refused_with_the_remedy():
    params = [torch.nn.Parameter(torch.ones(s)) for s in SMALL_SHAPES]
    for p in params:
        p.grad = torch.ones_like(p)
    adam, sgd, nesterov = (
        torch.optim.Adam(params),
        torch.optim.SGD(params, momentum=0.9),
        torch.optim.SGD(params, momentum=0.9, nesterov=True),
    )
    for optimizer in (adam, sgd, nesterov):
        optimizer.step()
    for kind, optimizer, message in (
        (onebit.DistributedSGD, adam, "exp_avg.*Load it into"),
        (onebit.DistributedAdam, sgd, "momentum_buffer.*Load it into"),
        (onebit.DoubleSqueeze, sgd, "momentum_buffer.*Load it into"),
        (onebit.DistributedSGD, nesterov, "nesterov=False"),
    ):
        run = make(Single(), kind, shapes=SMALL_SHAPES)
        before = everything(run)
        with pytest.raises(ValueError, match=message):
            run.optimizer.load_state_dict(optimizer.state_dict())
        assert same(before, everything(run))


@pytest.mark.parametrize("kind", [onebit.DistributedSGD, onebit.LocalSGD])
def test_errors_of_another_kind_are_refused_or_reset(kind):
    """Who does not compress has no use for them."""
    run = make(Single(), onebit.EFMomentumSGD, shapes=SMALL_SHAPES)
    for t in range(3):
        step(run, t, 0)
    other = make(Single(), kind, shapes=SMALL_SHAPES)
    with pytest.raises(ValueError, match="errors of EFMomentumSGD.*reset_errors=True"):
        other.optimizer.load_state_dict(saved(run.optimizer))
    with pytest.warns(UserWarning, match="is lost"):
        other.optimizer.load_state_dict(saved(run.optimizer), reset_errors=True)
    assert other.optimizer.steps == 3


@pytest.mark.parametrize("kind", [onebit.DistributedSGD, onebit.LocalSGD, onebit.EFMomentumSGD])
def test_a_state_without_momentum_is_not_taken_for_one_with_it(kind):
    run = make(Single(), onebit.DoubleSqueeze, shapes=SMALL_SHAPES)
    step(run, 0, 0)
    for reset_errors in (False, True):
        with pytest.raises(ValueError, match="lack momentum, dampening: it is another optimizer's"):
            make(Single(), kind, shapes=SMALL_SHAPES).optimizer.load_state_dict(
                saved(run.optimizer), reset_errors=reset_errors
            )


# ---- the rest of the contract


@pytest.mark.parametrize("kind, groups", ALL)
def test_bfloat16_parameters_keep_float32_state(kind, groups):
    """The ranks agree wherever they meet, and x is rounded to its own type once a step."""

    def run(communicator):
        run = make(communicator, kind, dtype=torch.bfloat16, lr=0.1)
        for t in range(8):
            step(run, t, communicator.rank)
        assert {
            v.dtype
            for entries in run.optimizer.state_dict()["state"].values()
            for v in entries.values()
        } == {torch.float32}
        return [p.detach() for p in run.params]

    results = run_threads(3, run)
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in results[0])
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize(
    "kind, option", [(onebit.EFMomentumSGD, "momentum"), (onebit.DoubleSqueeze, "weight_decay")]
)
def test_options_that_were_sent_must_not_change_before_the_step(kind, option):
    def make_and_step():
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), overlap=True, communicator=Single())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        return optimizer

    optimizer = make_and_step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    optimizer = make_and_step()
    optimizer.param_groups[0][option] = 0.5
    with pytest.raises(RuntimeError, match=f"{option}.* changed between backward and step"):
        optimizer.step()


@pytest.mark.parametrize(
    "kind, options, error, message",
    [
        (
            onebit.DistributedSGD,
            {"momentum": 1.0},
            ValueError,
            r"momentum must be a number in \[0, 1\)",
        ),
        (onebit.DistributedSGD, {"nesterov": True}, TypeError, "leave it out"),
        (onebit.DistributedSGD, {"beta": 0.9}, TypeError, "it takes lr, momentum"),
        (
            onebit.DoubleSqueeze,
            {"momentum": 0.9},
            TypeError,
            "DoubleSqueeze has no option 'momentum'",
        ),
        (onebit.EFMomentumSGD, {"compressor": 3}, TypeError, "compressor must be"),
        (onebit.LocalSGD, {"tau": 0}, ValueError, "tau must be a whole number of at least 1"),
        (onebit.LocalSGD, {"overlap": True}, TypeError, "LocalSGD has no option 'overlap'"),
    ],
)
def test_wrong_options_name_the_remedy(kind, options, error, message):
    with pytest.raises(error, match=message):
        make(Single(), kind, **options)


def test_ranks_with_another_tau_raise():
    def run(communicator):
        run = make(communicator, onebit.LocalSGD, tau=2 + communicator.rank)
        with pytest.raises(RuntimeError, match="tau=2.*tau=3"):
            step(run, 0, communicator.rank)

    run_threads(2, run)
