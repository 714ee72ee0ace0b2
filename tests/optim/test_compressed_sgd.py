"""DoubleSqueeze and EF momentum SGD equal their references, and SGD or 1-bit Adam at the right
options.
"""

import numpy as np
import pytest
import torch
from helpers.cases import more
from helpers.reference_runs import WORLD_SIZES, gradients_of_all, joined, segments, start_values
from helpers.sgd_runs import (
    PLAIN,
    SGD_GROUPS,
    UNDECAYED,
    assert_equals_sgd_reference,
    sgd_reference_options,
    train_sgd,
)
from helpers.small_runs import SMALL_SHAPES, make, same, saved, step

import onebit
from onebit import reference
from onebit.comm import Single, run_threads
from onebit.compression import Identity


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize(
    "kind, groups, algorithm",
    [
        (onebit.DoubleSqueeze, PLAIN, reference.double_squeeze),
        (onebit.EFMomentumSGD, SGD_GROUPS, reference.ef_momentum_sgd),
    ],
)
@pytest.mark.parametrize(
    "compressor, C", [(None, reference.one_bit), (Identity, reference.identity)]
)
@pytest.mark.parametrize("max_norm", [5.0, *more(None)])
def test_compressed_sgd_equals_its_reference(
    ranks, kind, groups, algorithm, compressor, C, max_norm
):
    history = run_threads(
        ranks,
        lambda c: train_sgd(c, kind, groups, {"compressor": compressor, "max_grad_norm": max_norm}),
    )
    assert_equals_sgd_reference(
        history,
        algorithm(
            joined(start_values()),
            gradients_of_all(ranks),
            ranks,
            groups=segments(ranks),
            C=C,
            **sgd_reference_options(groups),
            max_norm=max_norm,
        ),
    )


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_double_squeeze_with_identity_equals_sgd_bit_for_bit(ranks):
    """Nothing is lost, so both errors stay 0, and both averages add in rank order."""
    squeezed = run_threads(
        ranks,
        lambda c: train_sgd(
            c, onebit.DoubleSqueeze, UNDECAYED, {"compressor": Identity}, dtype=torch.float32
        ),
    )
    exact = run_threads(
        ranks, lambda c: train_sgd(c, onebit.DistributedSGD, UNDECAYED, dtype=torch.float32)
    )
    for a, b in zip(squeezed[0], exact[0]):
        np.testing.assert_array_equal(a["x"], b["x"])
        assert not a["delta"].any() and not a["server_error"].any()


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_ef_momentum_sgd_with_identity_equals_momentum_sgd(ranks):
    """mean_i (momentum m + g_i) = momentum m + mean_i g_i, to rounding."""
    ours = run_threads(
        ranks, lambda c: train_sgd(c, onebit.EFMomentumSGD, SGD_GROUPS, {"compressor": Identity})
    )
    exact = run_threads(ranks, lambda c: train_sgd(c, onebit.DistributedSGD, SGD_GROUPS))
    for a, b in zip(ours[0], exact[0]):
        for name in "xm":
            np.testing.assert_allclose(a[name], b[name], rtol=1e-11, atol=1e-12)


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


def test_the_error_of_double_squeeze_cancels_in_the_sum_of_steps():
    """x_T = x_0 - lr sum_t mean_i g_i + lr (mean_i delta_i + delta_bar): "1-bit Adam", section
    4.1.
    """

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
