"""Wrong options of optimizers and parameter groups are refused with the remedy."""

import math

import pytest
import torch
from helpers.cases import holds_for_each
from helpers.small_runs import make, step

import onebit
from onebit.comm import Single

P = [torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.report("R25")
@holds_for_each(
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
    ]
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


@pytest.mark.parametrize(
    "variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_several_processes_without_a_process_group_raise(variable, monkeypatch):
    monkeypatch.setenv(variable, "4")
    with pytest.raises(RuntimeError, match=r"Single\(\)"):
        onebit.OneBitAdam(P, warmup=3)
    onebit.OneBitAdam(P, warmup=3, communicator=Single())


def test_a_refused_group_leaves_nothing_behind():
    run = make(Single(), warmup=5)
    with pytest.raises(ValueError, match="lr must"):
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": -1.0})
    assert len(run.optimizer.param_groups) == 1
    run.optimizer.param_groups[0]["compress"] = False
    for t in range(2):
        with pytest.raises(ValueError, match="DistributedAdam"):
            step(run, t, 0)


def test_an_option_of_the_whole_optimizer_in_a_group_is_refused():
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "variance_floor": 1e-3}
    with pytest.raises(TypeError, match="variance_floor is an option of OneBitAdam as a whole"):
        onebit.OneBitAdam([group], warmup=3)
