"""Every optimizer gives the same bits over threads, gloo and MPI in both phases.

Differing ranks raise on all of them.
"""

import pytest
import torch
from helpers.differing_ranks import differing
from helpers.launch import BACKENDS
from helpers.small_runs import everything, make, saved, step

import onebit

SHAPES = ((70,), (9, 15), (0, 4), (), (257, 3))
BETAS, MOMENTUM = {"betas": (0.9, 0.7)}, {"momentum": 0.9, "weight_decay": 0.01}
KINDS = [
    (onebit.OneBitAdam, BETAS | {"warmup": 6}),
    (onebit.NaiveOneBitAdam, BETAS),
    (onebit.DistributedAdam, BETAS),
    (
        onebit.ZeroOneAdam,
        BETAS
        | {
            "variance_freeze_step": 5,
            "variance_update_scaler": 2,
            "local_step_scaler": 4,
            "local_step_clipper": 2,
        },
    ),
    (onebit.Lamb, BETAS),
    (onebit.OneBitLamb, BETAS | {"warmup": 6, "scale": "fused", "coefficient_beta": 0.8}),
    (onebit.QuantizedVarianceAdam, BETAS),
    (onebit.LazyVarianceAdam, BETAS | {"tau": 4}),
    (onebit.OneBitAdam, BETAS | {"warmup": 6, "compressor": onebit.compression.TopK}),
    (onebit.DistributedSGD, MOMENTUM),
    (onebit.DoubleSqueeze, {}),
    (onebit.EFMomentumSGD, MOMENTUM),
    (onebit.LocalSGD, MOMENTUM | {"tau": 3}),
]


def kinds(size):
    """All of them at one size; the first ones, which differ most in what they send, at every
    size.
    """
    return KINDS if size == 3 else KINDS[:4]


def train(communicator):
    """Steps across the freeze, one skipped, a new warm-up and a resume.

    The state after each, and the traffic.
    """
    history = []
    for kind, options in kinds(communicator.size):
        run = make(communicator, kind, shapes=SHAPES, max_grad_norm=3.0, **options)
        steps = 24 if "warmup" in options else 14
        for t in range(steps):
            if t == 15:
                run.optimizer.restart_warmup(3)
            if t == steps - 3:
                run.optimizer.load_state_dict(saved(run.optimizer))
            bad = t == 10 and communicator.rank == communicator.size - 1
            step(run, t, communicator.rank, scale=float("nan") if bad else 1.0)
            history.append(
                (
                    everything(run),
                    run.optimizer.phase,
                    run.optimizer.last_step_skipped,
                    vars(run.optimizer.communication.last_step),
                )
            )
    return history


def several_things(communicator):
    message = (
        differing(communicator, lambda params, options: (params[:1], options))
        if communicator.size > 2
        else None
    )
    return train(communicator), message


SIZES = (1, 2, 3, 4)


def first_ranks(communicator, size):
    """The first `size` ranks of a world, as a communicator of the same backend; None on the
    others.
    """
    inside = communicator.rank < size
    if isinstance(communicator, onebit.comm.Mpi):
        part = communicator.comm.Split(inside)
        return onebit.comm.Mpi(part) if inside else None
    group = torch.distributed.new_group(range(size))
    return onebit.comm.TorchDistributed(group) if inside else None


def all_sizes(communicator):
    """One launch for all sizes, since it takes seconds."""
    parts = {size: first_ranks(communicator, size) for size in SIZES}
    return {size: several_things(part) for size, part in parts.items() if part}


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_threads_and_processes_agree_bit_for_bit(backend):
    found = BACKENDS[backend](max(SIZES), all_sizes)
    for size in SIZES:
        expected = BACKENDS["threads"](size, several_things)
        for (history, message), other in zip(expected, found):
            other_history, other_message = other[size]
            assert message == other_message and (size < 3 or "nothing more" in message)
            for ours, theirs in zip(history, other_history, strict=True):
                assert ours[1:] == theirs[1:]
                assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
            assert sum(skipped for _, _, skipped, _ in history) == len(kinds(size)) - (
                size == 3
            )  # LocalSGD has a local step there
            assert [phase for _, phase, _, _ in history[:24]].count("compressed") > 8


def two_groups_of_two(communicator):
    """Ranks {0, 2} and {1, 3} train different models, one group slower than the other.

    What it does alone, it does beside the other.
    """
    import time

    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = communicator.rank % 2
    own = onebit.comm.TorchDistributed(groups[mine])
    run = make(own, shapes=[((33,),), ((5, 7), (12,))][mine], warmup=4)
    for t in range(10):
        time.sleep(0.02 * mine)
        step(run, t, own.rank)
    return mine, everything(run)


@pytest.mark.report("R04")
def test_disjoint_process_groups_do_not_disturb_each_other():
    alone = [BACKENDS["threads"](2, group_alone, mine) for mine in range(2)]
    for rank, (mine, state) in enumerate(BACKENDS["gloo"](4, two_groups_of_two)):
        assert all(torch.equal(a, b) for a, b in zip(state, alone[mine][rank // 2], strict=True))


def group_alone(communicator, mine):
    run = make(communicator, shapes=[((33,),), ((5, 7), (12,))][mine], warmup=4)
    for t in range(10):
        step(run, t, communicator.rank)
    return everything(run)
