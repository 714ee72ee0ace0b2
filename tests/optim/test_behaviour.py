"""What a user meets: wrong input, missing and broken gradients, masks, a new warm-up, traffic."""

import copy
import math
import re
import warnings
from collections import namedtuple

import pytest
import torch

import onebit
from onebit.comm import Single, run_threads

Run = namedtuple("Run", "params optimizer")


def make(
    communicator, kind=onebit.OneBitAdam, shapes=((4, 5), (9,)), dtype=torch.float32, **options
):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    return Run(params, kind(params, communicator=communicator, **options))


def step(run, t, rank, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * t + rank)
    for p in run.params:
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype)
    run.optimizer.step()


def everything(run):
    """All that a step may change, copied."""
    state = [
        v.clone()
        for entries in run.optimizer.state_dict()["state"].values()
        for v in entries.values()
    ]
    return [p.detach().clone() for p in run.params] + state


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- compression is really on, at the stated step


def test_phase_and_bytes_change_at_the_stated_step():
    def run(communicator):
        run = make(communicator, shapes=((300, 40), (777,)), warmup=10)
        phases, sent, calls = [], [], []
        for t in range(20):
            phases.append(run.optimizer.phase)
            step(run, t, communicator.rank)
            last = run.optimizer.communication.last_step
            sent.append(last.bytes_sent)
            calls.append(last.calls)
        return phases, sent, calls, run.optimizer.communication, communicator

    for phases, sent, calls, total, communicator in run_threads(4, run):
        assert phases == ["warmup"] * 10 + ["compressed"] * 10
        assert len(set(sent[:10])) == 1 and len(set(sent[10:])) == 1
        assert sent[10] <= sent[0] / 14 and calls[10:] == [3] * 10
        assert (total.bytes_sent, total.calls) == (sum(sent), sum(calls))
        comparing_the_ranks = 2 * 3 * 32  # at the first step and at the freeze
        assert (
            communicator.bytes_sent == total.bytes_sent + comparing_the_ranks
            and communicator.calls == total.calls + 2
        )
        assert total.last_step.compression_ratio > 25
        with pytest.raises(AttributeError):
            total.bytes_sent = 0


def test_a_compressed_step_sends_at_most_a_thirtieth_for_a_model_of_1_m_parameters():
    shapes = (
        (30_522 // 8, 128),
        *((128, 128), (128,), (512, 128), (512,), (128, 512), (128,), (128,), (128,)) * 3,
    )
    assert sum(map(math.prod, shapes)) > 900_000

    def run(communicator):
        run = make(communicator, shapes=shapes, warmup=2)
        sent = []
        for t in range(3):
            step(run, t, communicator.rank)
            sent.append(run.optimizer.communication.last_step.bytes_sent)
        return sent

    for _, warmup, compressed in run_threads(4, run):
        assert warmup >= 2 * 3 / 4 * 4 * sum(map(math.prod, shapes))
        assert compressed <= warmup / 30


def test_the_first_step_moves_the_parameters_and_counts():
    run = make(Single(), warmup=5, lr=1.0)
    before = everything(run)
    step(run, 0, 0)
    assert run.optimizer.steps == 1 and not torch.equal(before[0], run.params[0])
    assert {int(run.optimizer.state[p]["step"]) for p in run.params} == {1}


@pytest.mark.parametrize("warmup", [1, 2])
def test_the_shortest_warmups_work_and_warn(warmup):
    run = make(Single(), warmup=warmup)
    with pytest.warns(UserWarning, match="longer warmup"):
        for t in range(10):
            step(run, t, 0)
    assert run.optimizer.phase == "compressed" and all(
        torch.isfinite(x).all() for x in everything(run)
    )


def test_a_variance_that_still_changes_at_the_freeze_warns():
    run = make(Single(), warmup=30, betas=(0.9, 0.9))
    with pytest.warns(UserWarning, match="still changes"):
        for t in range(30):
            step(run, t, 0, scale=1 + t)


def test_a_settled_variance_is_frozen_without_a_warning():
    run = make(Single(), shapes=((5000,),), warmup=60, betas=(0.9, 0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(70):
            step(run, t, 0)


def test_variance_ratio_freezes_at_the_first_step_that_the_rule_allows():
    """Gradients grow until step 40, then stay: the rule, recomputed here from v itself, picks the same step on all ranks."""
    policy = onebit.VarianceRatio(threshold=0.9, min_steps=15)

    def run(communicator):
        run = make(communicator, shapes=((400,),), warmup=policy, betas=(0.9, 0.9))
        norms = {0: 0.0}
        for t in range(1, 101):
            if run.optimizer.phase == "compressed":
                return t - 1, run.optimizer.warmup.chosen, norms
            step(run, t, communicator.rank, scale=min(t, 40))
            norms[t] = float(run.optimizer.state[run.params[0]]["exp_avg_sq"].double().sum()) / (
                1 - 0.9**t
            )

    for frozen_after, chosen, norms in run_threads(2, run):
        settled = [
            t
            for t in norms
            if t > 15 and norms[t - 10] and 0.9 <= norms[t] / norms[t - 10] <= 1 / 0.9
        ]
        assert frozen_after == chosen == settled[0] and 40 < chosen < 100
    assert policy.chosen is None  # the optimizer keeps its own copy


# ---- gradients that are missing or broken


def test_a_missing_gradient_counts_as_zero_and_hangs_nobody():
    def run(communicator, missing):
        run = make(communicator, warmup=6)
        for t in range(12):
            for i, p in enumerate(run.params):
                p.grad = torch.full(p.shape, 0.1 * (t + 1))
                if i == 1 and communicator.rank == 1 and t % 2:
                    p.grad = None if missing else torch.zeros(p.shape)
            run.optimizer.step()
        return everything(run)

    for with_none, with_zeros in zip(
        run_threads(2, lambda c: run(c, True)), run_threads(2, lambda c: run(c, False))
    ):
        assert same(with_none, with_zeros)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    "kind, options",
    [
        (onebit.OneBitAdam, {"warmup": 6}),
        (onebit.DistributedAdam, {}),
        (onebit.NaiveOneBitAdam, {}),
    ],
)
@pytest.mark.parametrize("at", [3, 6, 9])
def test_one_broken_gradient_makes_all_ranks_skip_and_changes_nothing(bad, kind, options, at):
    def run(communicator):
        run = make(communicator, kind, **options)
        for t in range(at):
            step(run, t, communicator.rank)
        before = everything(run), run.optimizer.steps
        for p in run.params:
            p.grad = torch.ones(p.shape)
        if communicator.rank == 1:
            run.params[0].grad[2, 3] = bad
        run.optimizer.step()
        skipped = run.optimizer.last_step_skipped
        after = everything(run), run.optimizer.steps
        step(run, at, communicator.rank)
        return before, after, skipped, run.optimizer.last_step_skipped, everything(run)

    for before, after, skipped, skipped_again, end in run_threads(3, run):
        assert skipped and not skipped_again
        assert before[1] == after[1] and same(before[0], after[0])
        assert all(torch.isfinite(x).all() for x in end) and not same(end, after[0])


def test_endless_skipping_is_an_error():
    run = make(Single(), warmup=3)
    for p in run.params:
        p.grad = torch.full(p.shape, math.inf)
    with pytest.raises(RuntimeError, match="in a row"):
        for _ in range(200):
            run.optimizer.step()


def test_zero_gradients_change_nothing_in_either_phase():
    run = make(Single(), warmup=6)
    start = [p.detach().clone() for p in run.params]
    for _ in range(12):
        for p in run.params:
            p.grad = torch.zeros(p.shape)
        run.optimizer.step()
    assert (
        same(start, [p.detach() for p in run.params])
        and not run.optimizer.state[run.params[0]]["worker_error"].any()
    )


@pytest.mark.parametrize("warmup, expected", [(100, "mean"), (1, "local")])
def test_all_ranks_clip_by_one_factor(warmup, expected):
    """Rank 0 has the gradient (100, 0), rank 1 (0, 1), the bound is 1. Warm-up: the mean (50, 0.5) is clipped to norm 1.
    Compressed: both by 1 / sqrt((100^2 + 1) / 2), so that the momentum stays the mean of equally scaled gradients."""

    def run(communicator):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = onebit.OneBitAdam(
            [p],
            warmup=warmup,
            betas=(0.0, 0.5),
            max_grad_norm=1.0,
            communicator=communicator,
            compressor=onebit.compression.Identity,
        )
        for _ in range(2):
            p.grad = torch.tensor([[100.0, 0.0], [0.0, 1.0]][communicator.rank])
            optimizer.step()
        return optimizer.state[p]["exp_avg"]

    mean = torch.tensor([50.0, 0.5])
    factor = 1 / mean.norm() if expected == "mean" else 1 / math.sqrt((100**2 + 1) / 2)
    for momentum in run_threads(2, run):
        torch.testing.assert_close(momentum, mean * factor, rtol=1e-5, atol=1e-7)


# ---- zero variance at the freeze


def masked_run(communicator, steps, late_from=10**9, **options):
    """32 coordinates pulled to 1; the second half has no gradient before step `late_from`."""
    p = torch.nn.Parameter(torch.zeros(32))
    optimizer = onebit.OneBitAdam(
        [p], lr=1e-2, betas=(0.9, 0.9), warmup=20, communicator=communicator, **options
    )
    for t in range(steps):
        p.grad = (p.detach() - 1) + 0.01 * torch.randn(
            32, generator=torch.Generator().manual_seed(100 * t + communicator.rank)
        )
        if t < late_from:
            p.grad[16:] = 0
        yield t, p, optimizer
        optimizer.step()


def test_coordinates_without_variance_keep_their_value_exactly():
    def run(communicator):
        for _, p, optimizer in masked_run(communicator, 200):
            pass
        return p.detach()

    for x in run_threads(2, run):
        assert not x[16:].any() and (x[:16] - 1).abs().max() < 0.2


def test_late_gradients_are_warned_of_and_harmless():
    with pytest.warns(UserWarning, match="do not train") as caught:
        for _, p, _ in masked_run(Single(), 60, late_from=25):
            pass
    assert sum("do not train" in str(w.message) for w in caught) == 1
    assert not p[16:].any() and torch.isfinite(p).all()


def test_a_variance_floor_lets_late_coordinates_train():
    for _, p, _ in masked_run(Single(), 400, late_from=25, variance_floor=0.1):
        pass
    assert (p.detach() - 1).abs().max() < 0.3


def test_a_new_warmup_lets_late_coordinates_train():
    for t, p, optimizer in masked_run(Single(), 400, late_from=25):
        if t == 30:
            optimizer.restart_warmup(30)
    assert (p.detach() - 1).abs().max() < 0.3


def test_weight_decay_holds_in_the_compressed_phase_and_on_masked_coordinates():
    """Decoupled: x shrinks by (1 - lr wd) a step. 400 compressed steps with lr 1e-2, wd 0.1: (1 - 1e-3)^400 = 0.670."""

    def run(communicator):
        p = torch.nn.Parameter(torch.ones(500))
        optimizer = onebit.OneBitAdam(
            [p], lr=1e-2, betas=(0.9, 0.9), weight_decay=0.1, warmup=30, communicator=communicator
        )
        generator = torch.Generator().manual_seed(communicator.rank)
        for t in range(430):
            p.grad = torch.randn(500, generator=generator) * 1e-3
            p.grad[400:] = 0
            if t == 30:
                for q, v in ((p, 1.0), (optimizer.state[p]["exp_avg"], 0.0)):
                    q.data.fill_(v)
                optimizer.state[p]["exp_avg_sq"][:400] = 1e-2  # so that only decay moves x
            optimizer.step()
        return p.detach()

    for x in run_threads(2, run):
        assert x[:400].mean().item() == pytest.approx(0.670, abs=3e-3)
        torch.testing.assert_close(x[400:], torch.full((100,), 0.999**400), rtol=1e-4, atol=0)


# ---- a new warm-up, one state for all ranks


def test_a_new_warmup_keeps_what_the_errors_hold():
    """m after = m before + mean worker error + server error; errors are zero; then exact Adam; then compressed again."""

    def run(communicator):
        run = make(communicator, shapes=((70,), (129,)), warmup=5, dtype=torch.float64)
        for t in range(12):
            step(run, t, communicator.rank)
        (part,) = run.optimizer._compressed
        before = part.momentum.clone(), *part.errors()
        run.optimizer.restart_warmup(4)
        after = part.momentum.clone(), any(error.any() for error in part.errors())
        phases = []
        for t in range(12, 20):
            phases.append(run.optimizer.phase)
            step(run, t, communicator.rank)
        return before, after, phases, [p.detach() for p in run.params]

    results = run_threads(3, run)
    error = sum(r[0][1] for r in results) / 3 + torch.cat([r[0][2] for r in results])
    for before, after, phases, params in results:
        torch.testing.assert_close(after[0], before[0] + error, rtol=1e-12, atol=1e-14)
        assert not after[1] and phases == ["warmup"] * 4 + ["compressed"] * 4
        assert same(params, results[0][3])


def test_synchronize_keeps_the_total_error_and_makes_ranks_alike():
    def run(communicator):
        run = make(communicator, shapes=((70,), (129,)), warmup=5, dtype=torch.float64)
        for t in range(12):
            step(run, t, communicator.rank)
        (part,) = run.optimizer._compressed
        before = part.errors()
        run.optimizer.synchronize()
        return before, *part.errors()

    results = run_threads(3, run)
    error = sum(r[0][0] for r in results) / 3 + torch.cat([r[0][1] for r in results])
    for _, worker_error, server_error in results:
        torch.testing.assert_close(worker_error, error, rtol=1e-12, atol=1e-14)
        assert not server_error.any() and torch.equal(worker_error, results[0][1])


# ---- as any optimizer


def test_closures_and_schedulers():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = onebit.OneBitAdam([p], lr=0.1, warmup=5, communicator=Single())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t < 3 else 0.0)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(8):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert (
        losses[0] == 3.0 and losses[3] < losses[0] and losses[3] == losses[-1]
    )  # lr 0 from the fourth step on


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_keep_float32_state(dtype):
    """The gradients travel in their own dtype; two parameters of 9 elements exercise the padding."""

    def run(communicator):
        run = make(communicator, shapes=((9,), (9, 3)), dtype=dtype, warmup=20, betas=(0.9, 0.9))
        full = make(communicator, shapes=((9,), (9, 3)), warmup=20, betas=(0.9, 0.9))
        for t in range(200):
            step(run, t, communicator.rank)
            for p, q in zip(full.params, run.params):
                p.grad = q.grad.float()
            full.optimizer.step()
        return run, full

    for half, full in run_threads(2, run):
        for p, q in zip(half.params, full.params):
            state = half.optimizer.state[p]
            assert p.dtype == dtype and {
                state[k].dtype for k in ("exp_avg", "exp_avg_sq", "worker_error")
            } == {torch.float32}
            torch.testing.assert_close(p.float(), q.detach(), rtol=0.1, atol=0.1)


def test_layouts_of_any_strides_and_shapes():
    base = torch.randn(6, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    results = []
    for make_contiguous in (True, False):
        p = torch.nn.Parameter(
            base.clone().permute(3, 1, 0, 2).contiguous()
            if make_contiguous
            else base.clone().permute(3, 1, 0, 2)
        )
        q = torch.nn.Parameter(torch.ones(()))
        empty = torch.nn.Parameter(torch.empty(0, 10))
        optimizer = onebit.OneBitAdam([p, q, empty], warmup=4, communicator=Single())
        for t in range(9):
            (torch.sin(p * (t + 1)).sum() * q + empty.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach(), q.detach()])
    assert same(*results)


def test_frozen_parameters_are_left_alone():
    run = make(Single(), warmup=4, weight_decay=0.1)
    run.params[1].requires_grad_(False)
    before = run.params[1].clone()
    for t in range(8):
        run.params[0].grad = torch.ones_like(run.params[0])
        run.optimizer.step()
    assert torch.equal(before, run.params[1])


# ---- wrong input

P = [torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"freeze_step": 10}, TypeError, "did you mean 'warmup'"),
        ({"warmup": 3, "max_grad_nrm": 1.0}, TypeError, "did you mean 'max_grad_norm'"),
        ({}, TypeError, "needs warmup="),
        ({"warmup": 0}, ValueError, "at least 1"),
        ({"warmup": 2.5}, ValueError, "whole number"),
        ({"warmup": 0.15}, ValueError, "whole number"),
        ({"warmup": "100"}, ValueError, "whole number"),
        ({"warmup": 3, "lr": -1.0}, ValueError, "lr must"),
        ({"warmup": 3, "betas": (0.9, 1.0)}, ValueError, "betas must"),
        ({"warmup": 3, "max_grad_norm": 0.0}, ValueError, "max_grad_norm"),
        ({"warmup": 3, "variance_floor": -1}, ValueError, "variance_floor"),
        ({"warmup": math.nan}, ValueError, "whole number"),
        ({"warmup": 3, "lr": None}, ValueError, "lr must be a number"),
        ({"warmup": 3, "eps": "1e-8"}, ValueError, "eps must be a number"),
        ({"warmup": 3, "betas": 0.9}, ValueError, "betas must"),
        ({"warmup": 3, "amsgrad": True}, TypeError, "leave it out"),
        (
            {"warmup": 3, "bias_correction": "no"},
            ValueError,
            "bias_correction must be True or False",
        ),
        ({"warmup": 3, "compressor": "sign"}, TypeError, "onebit.compression.Sign"),
        ({"warmup": 3, "communicator": "gloo"}, TypeError, "onebit.comm.TorchDistributed"),
    ],
)
def test_wrong_options_name_the_remedy(options, error, message):
    with pytest.raises(error, match=message):
        onebit.OneBitAdam(P, **options)


def test_wrong_groups_name_the_remedy():
    with pytest.raises(TypeError, match="did you mean 'compress'"):
        onebit.OneBitAdam([{"params": P, "compres": False}], warmup=3)
    with pytest.raises(ValueError, match="DistributedAdam"):
        onebit.OneBitAdam([{"params": P, "compress": False}], warmup=3)
    with pytest.raises(ValueError, match="floating-point"):
        onebit.OneBitAdam(
            [torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)], warmup=3
        )
    with pytest.raises(ValueError, match="min_steps"):
        onebit.VarianceRatio()
    run = make(Single(), warmup=2)
    step(run, 0, 0)
    with pytest.raises(ValueError, match="requires_grad"):
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def test_changing_compress_while_frozen_names_the_remedy():
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = onebit.OneBitAdam(
        [{"params": [p]} for p in params], warmup=3, communicator=Single()
    )

    def steps(count):
        for _ in range(count):
            for p in params:
                p.grad = torch.ones(5)
            optimizer.step()

    steps(5)
    optimizer.param_groups[1]["compress"] = False
    with pytest.raises(ValueError, match="restart_warmup"):
        steps(1)
    optimizer.restart_warmup(2)
    steps(4)
    assert "worker_error" not in optimizer.state[params[1]] and optimizer.phase == "compressed"


def differing(communicator, change):
    params = [("a", torch.nn.Parameter(torch.ones(3))), ("b", torch.nn.Parameter(torch.ones(4, 2)))]
    options = {"lr": 0.1}
    if communicator.rank == 2:
        params, options = change(params, options)
    optimizer = onebit.OneBitAdam(params, warmup=3, communicator=communicator, **options)
    for _, p in params:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda p, o: (p[:1], o), "rank 2 has nothing more"),
        (
            lambda p, o: ([p[0], ("b", torch.nn.Parameter(torch.ones(2, 4)))], o),
            r"rank 2 has b: shape \(2, 4\)",
        ),
        (
            lambda p, o: ([p[0], ("b", torch.nn.Parameter(torch.full((4, 2), 1.5)))], o),
            "rank 2 has b: checksum",
        ),
        (lambda p, o: (p[::-1], o), "rank 0 has a: .* rank 2 has b:"),
        (lambda p, o: (p, {"lr": 0.2}), "lr=0.2"),
        (lambda p, o: (p, {"max_grad_norm": 1.0}), "max_grad_norm=1.0"),
    ],
)
def test_ranks_that_differ_all_raise_and_name_the_first_difference(change, named):
    messages = run_threads(3, lambda c: differing(c, change))
    assert len(set(messages)) == 1 and "broadcast_parameters" in messages[0]
    assert re.search(named, messages[0])


def test_broadcast_parameters_makes_differing_ranks_train():
    def run(communicator):
        generator = torch.Generator().manual_seed(communicator.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 10)
        onebit.broadcast_parameters(model, communicator)
        optimizer = onebit.OneBitAdam(model.named_parameters(), warmup=3, communicator=communicator)
        optimizer.step()
        return [t.clone() for t in model.state_dict().values()]

    results = run_threads(3, run)
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_sparse_gradients_raise_on_all_ranks():
    def run(communicator):
        embedding = torch.nn.Embedding(10, 4, sparse=communicator.rank == 1)
        with torch.no_grad():
            embedding.weight.fill_(1.0)
        optimizer = onebit.OneBitAdam(
            embedding.named_parameters(), warmup=3, communicator=communicator
        )
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises((ValueError, RuntimeError), match="sparse"):
            optimizer.step()
        return True

    assert run_threads(2, run) == [True, True]
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        onebit.OneBitAdam(embedding.parameters(), warmup=3).step()


@pytest.mark.parametrize(
    "variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_several_processes_without_a_process_group_raise(variable, monkeypatch):
    monkeypatch.setenv(variable, "4")
    with pytest.raises(RuntimeError, match=r"Single\(\)"):
        onebit.OneBitAdam(P, warmup=3)
    onebit.OneBitAdam(P, warmup=3, communicator=Single())


# ---- what would ruin a run silently


@pytest.mark.parametrize("change", ["lr", "requires_grad", "weight_decay"])
@pytest.mark.parametrize("at", [3, 8])
def test_ranks_whose_options_come_to_differ_raise_at_the_next_agreement(change, at):
    """In the warm-up that is the freeze, in the compressed phase the next step."""

    def run(communicator):
        run = make(communicator, warmup=6)
        for t in range(12):
            if t == at and communicator.rank == 1:
                if change == "lr":
                    run.optimizer.param_groups[0]["lr"] = 0.5
                elif change == "requires_grad":
                    run.params[1].requires_grad_(False)
                else:
                    run.optimizer.param_groups[0]["weight_decay"] = 0.1
            try:
                step(run, t, communicator.rank)
            except RuntimeError as error:
                assert "the ranks differ" in str(error)
                return t

    assert set(run_threads(2, run)) == {5 if at == 3 else 8}


def test_a_tiny_variance_is_warned_of_and_a_floor_cures_it():
    """A rare word's coordinate: one gradient early on, so that v is not zero at the freeze but next to nothing."""

    def train(**options):
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = onebit.OneBitAdam(
            [p], lr=1e-2, warmup=200, betas=(0.9, 0.9), communicator=Single(), **options
        )
        generator = torch.Generator().manual_seed(0)
        for t in range(300):
            p.grad = torch.randn(64, generator=generator)
            if t:
                p.grad[:2] = 0
            optimizer.step()
        return p.detach().abs().max()

    with pytest.warns(UserWarning, match="2 coordinates .* variance_floor"):
        assert train() > 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*variance_floor")
        assert train(variance_floor=1e-3) < 1


def test_an_overflowed_variance_raises_at_the_freeze():
    run = make(Single(), warmup=5)
    with pytest.raises(RuntimeError, match="overflowed"):
        for t in range(6):
            step(run, t, 0, scale=1e21 if t == 4 else 1.0)


def test_changing_compress_in_a_new_warmup_keeps_the_bias_correction():
    """A constant gradient: every step of Adam moves by lr, whatever the group was before."""
    for flags in ((True, False), (False, True)):
        params = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
        optimizer = onebit.OneBitAdam(
            [{"params": [params[0]]}, {"params": [params[1]], "compress": flags[0]}],
            lr=1.0,
            warmup=20,
            communicator=Single(),
        )
        for t in range(40):
            if t == 25:
                optimizer.restart_warmup(100)
                optimizer.param_groups[1]["compress"] = flags[1]
            before = params[1].detach().clone()
            for p in params:
                p.grad = torch.ones(8)
            optimizer.step()
            torch.testing.assert_close(
                before - params[1].detach(), torch.ones(8), rtol=2e-3, atol=0
            )


def test_the_variance_ratio_looks_at_compressed_groups_only():
    """A large settled group with compress=False does not hide that the other's variance still grows."""
    params = [torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(1000))]
    optimizer = onebit.OneBitAdam(
        [{"params": params[:1]}, {"params": params[1:], "compress": False}],
        betas=(0.9, 0.8),
        warmup=onebit.VarianceRatio(min_steps=0),
        communicator=Single(),
    )
    for t in range(60):
        params[0].grad, params[1].grad = torch.full((8,), 1.1**t), torch.ones(1000)
        optimizer.step()
    assert optimizer.phase == "warmup"


def test_what_cannot_work_is_refused_with_the_remedy():
    run = make(Single(), warmup=5)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(run.optimizer)
    with pytest.raises(ValueError, match="no parameter"):
        onebit.DistributedAdam([{"params": []}])


def test_a_model_converted_after_the_optimizer_was_made_raises():
    model = torch.nn.Linear(3, 2)
    optimizer = onebit.OneBitAdam(model.parameters(), warmup=3, communicator=Single())
    model.double()
    with pytest.raises(RuntimeError, match="from torch.float32 on cpu to torch.float64 on cpu"):
        optimizer.step()


def test_a_compiled_step_is_the_step():
    plain, compiled = (make(Single(), warmup=4) for _ in range(2))
    step_compiled = torch.compile(compiled.optimizer.step, backend="eager")
    for t in range(8):
        step(plain, t, 0)
        for p, q in zip(plain.params, compiled.params):
            q.grad = p.grad.clone()
        step_compiled()
        assert same(everything(plain), everything(compiled))


def test_a_refused_group_leaves_nothing_behind():
    run = make(Single(), warmup=5)
    with pytest.raises(ValueError, match="lr must"):
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": -1.0})
    assert len(run.optimizer.param_groups) == 1
    run.optimizer.param_groups[0]["compress"] = False
    for t in range(2):
        with pytest.raises(ValueError, match="DistributedAdam"):
            step(run, t, 0)


def test_groups_may_hold_keys_of_the_users_own():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = onebit.OneBitAdam([{"params": [p], "lr_scale": 0.5, "name": "head"}], warmup=3)
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


def test_broadcasting_differing_models_raises_on_all_ranks():
    def run(communicator):
        model = torch.nn.Linear(3, 4 + communicator.rank)
        with pytest.raises(RuntimeError, match="rank 1 has weight: shape .5, 3."):
            onebit.broadcast_parameters(model, communicator)
        return True

    assert run_threads(2, run) == [True, True]
