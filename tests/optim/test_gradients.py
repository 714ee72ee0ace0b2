"""Missing, zero and late gradients; parameters of any type, stride and shape, frozen or not."""

import pytest
import torch
from helpers.optimizer_kinds import KINDS
from helpers.small_runs import everything, make, same, saved, step

import onebit
from onebit.comm import Single, run_threads


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


def steps_of_the_first_parameter(run, count, rank, others=()):
    """Give the first parameter gradients, and `others` too; the rest have none."""
    for t in range(count):
        for i, p in enumerate(run.params):
            p.grad = torch.full(p.shape, 0.1 * (t + 1 + rank)) if i in (0, *others) else None
        run.optimizer.step()


@pytest.mark.report("P01")
@pytest.mark.parametrize("kind, options", KINDS)
def test_weight_decay_leaves_alone_what_never_had_a_gradient(kind, options):
    """Until some rank has a gradient of it; from then on a missing gradient counts as zero."""

    def run(communicator):
        rank = communicator.rank
        run = make(communicator, kind, weight_decay=0.1, lr=0.1, **options)
        start = run.params[1].detach().clone()
        steps_of_the_first_parameter(run, 8, rank)
        untouched = torch.equal(run.params[1], start)
        steps_of_the_first_parameter(run, 1, rank, others=(1,) if rank == 1 else ())
        steps_of_the_first_parameter(run, 1, rank)
        resumed = make(communicator, kind, weight_decay=0.1, lr=0.1, **options)
        resumed.optimizer.load_state_dict(saved(run.optimizer))
        for q, p in zip(resumed.params, run.params):
            q.data.copy_(p.data)
        for each in (run, resumed):
            steps_of_the_first_parameter(each, 1, rank)
        return untouched, torch.equal(run.params[1], start), everything(run), everything(resumed)

    (untouched, at_start, first, again), (other_untouched, _, second, _) = run_threads(2, run)
    assert untouched and other_untouched and not at_start
    assert same(first, again)
    assert kind.trains_apart or same(first[:2], second[:2])


@pytest.mark.report("F06")
@pytest.mark.parametrize("tell", ["broadcast", "named parameters"])
def test_parameters_that_start_alike_in_another_order_are_an_error(tell):
    def run(communicator):
        norms = torch.nn.ModuleList([torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)])
        if tell == "broadcast":
            onebit.broadcast_parameters(norms, communicator)
        named = list(norms.named_parameters())[:: -1 if communicator.rank else 1]
        params = named if tell == "named parameters" else [p for _, p in named]
        optimizer = onebit.OneBitAdam(params, warmup=3, communicator=communicator)
        norms[1](norms[0](torch.ones(8))).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="the ranks differ: rank 0 has .*0.weight"):
        run_threads(2, run)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_keep_float32_state(dtype):
    """The gradients travel in their own dtype; two parameters of 9 elements exercise the
    padding.
    """

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


def test_a_model_converted_after_the_optimizer_was_made_raises():
    model = torch.nn.Linear(3, 2)
    optimizer = onebit.OneBitAdam(model.parameters(), warmup=3, communicator=Single())
    model.double()
    with pytest.raises(RuntimeError, match="from torch.float32 on cpu to torch.float64 on cpu"):
        optimizer.step()
