"""torch.amp.GradScaler changes no bit; one rank's overflow makes all ranks skip."""

import pytest
import torch
from helpers.cases import more_of
from helpers.optimizer_kinds import KINDS
from helpers.small_runs import everything, make, same, step

import onebit
from onebit.comm import Single, run_threads


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
    [
        (1.0, True, True),
        *more_of((None, False, False), (None, True, False), (1.0, True, False)),
    ],
)
def test_a_grad_scaler_changes_no_bit(kind, options, max_grad_norm, check_finite, unscale):
    """Scales are powers of two, another one on each rank.

    Clipping is by the norm of the unscaled gradients.
    """
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


@pytest.mark.report("R05")
@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize(
    "check_finite, unscale", [(False, False), *more_of((True, True), (True, False))]
)
def test_one_ranks_overflow_makes_all_ranks_skip_and_only_its_scale_fall(
    kind, options, check_finite, unscale
):
    """What follows equals, bit for bit, the run in which these steps were never tried.

    One of them is in the warm-up and one in the compressed phase.
    """

    def run(communicator):
        without, scaled = (
            make(communicator, kind, check_finite=check_finite, **options) for _ in range(2)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for t in range(11):
            overflow = communicator.rank == 1 and t in (2, 7)
            scaled_step(scaled, t, communicator, scaler, unscale, overflow)
            assert scaled.optimizer.last_step_skipped == (t in (2, 7))
            if t not in (2, 7):
                step(without, t, communicator.rank)
            assert same(everything(scaled), everything(without))
        return scaler.get_scale(), [p.detach() for p in scaled.params]

    (scale_0, params_0), (scale_1, params_1), (scale_2, params_2) = run_threads(3, run)
    assert (
        (scale_0, scale_1, scale_2) == (1024.0, 256.0, 1024.0)
        and same(params_0, params_1)
        and same(params_0, params_2)
    )


@pytest.mark.parametrize("at", [2, 7])
def test_what_the_scaler_has_found_counts_even_if_it_was_mended_since(at):
    """After unscale_ a user may put 0 where the inf was.

    Torch skips all the same, and so do all ranks here.
    """

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


@pytest.mark.report("R45")
def test_float16_gradients_keep_what_the_scale_was_for():
    """1e-8 is 0 in float16; times 2^16 it is not, and it stays so on the wire once the scale is
    out.
    """

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
    """float16 forward and backward.

    The scale starts far too high and rank 1's gradients are a thousand times larger.
    """

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
