"""Every option of the old blocks is honoured or said aloud. Needs no DeepSpeed."""

import json
import math
import re
import warnings

import pytest
import torch
from helpers.cases import holds_for_each

import onebit
from onebit.comm import Single
from onebit.deepspeed import engine_config, from_config

KINDS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
COMMON = {"lr": 2e-3, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.02}


def params():
    return [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]


def block(kind, **options):
    freeze = {"ZeroOneAdam": "var_freeze_step"}.get(kind, "freeze_step")
    return {"type": kind, "params": {freeze: 7, **options}}


def made(config, **options):
    """(the optimizer, the warnings' text)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = from_config(config, params(), communicator=Single(), **options)
    return optimizer, " | ".join(str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("OneBitAdam", onebit.OneBitAdam),
        ("zerooneadam", onebit.ZeroOneAdam),
        ("ONEBITLAMB", onebit.OneBitLamb),
    ],
)
def test_the_type_is_read_in_any_case_and_common_options_are_honoured(kind, cls):
    name = {"zerooneadam": "ZeroOneAdam"}.get(kind, kind)
    optimizer, said = made({"type": kind, "params": block(name)["params"] | COMMON})
    assert type(optimizer) is cls and said == ""
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in COMMON} == COMMON | {"betas": (0.8, 0.95)}
    assert optimizer.bias_correction is False  # as the old ones, which accepted and ignored it


def test_the_freeze_step_is_the_length_of_the_warm_up():
    assert made(block("OneBitAdam"))[0].warmup.steps == 7
    assert made(block("OneBitLamb"))[0].warmup.steps == 7
    optimizer = made(block("ZeroOneAdam"))[0]
    assert "variance_freeze_step: 7" in repr(optimizer)


def test_a_missing_freeze_step_is_said_aloud():
    for kind, name in (
        ("OneBitAdam", "freeze_step"),
        ("ZeroOneAdam", "var_freeze_step"),
        ("OneBitLamb", "freeze_step"),
    ):
        optimizer, said = made({"type": kind, "params": {}})
        assert f"{name} is missing" in said and "100,000" in said
        assert "100000" in repr(optimizer)


def test_zero_one_adam_has_its_intervals():
    options = {"var_update_scaler": 3, "local_step_scaler": 5, "local_step_clipper": 2}
    described = repr(made(block("ZeroOneAdam", **options))[0])
    for text in ("update_scaler: 3", "local_step_scaler: 5", "local_step_clipper: 2"):
        assert text in described


def test_lamb_has_its_coefficients():
    options = {"max_coeff": 0.4, "min_coeff": 0.02, "coeff_beta": 0.8}
    options |= {"factor_max": 3.0, "factor_min": 0.25, "factor_threshold": 0.2}
    optimizer = made(block("OneBitLamb", **options))[0]
    assert optimizer.coefficient_bounds == (0.02, 0.4) and optimizer.coefficient_beta == 0.8
    assert optimizer.ratio_bounds == (0.25, 3.0) and optimizer.ratio_threshold == 0.2
    assert optimizer.ratio_of == "root" and optimizer.scale == "fused"
    assert made(block("OneBitLamb"))[0].coefficient_bounds == (0.01, 10.0)  # the old defaults


@pytest.mark.parametrize(("option", "value"), [("cuda_aware", True), ("comm_backend_name", "nccl")])
def test_what_concerned_the_old_transport_is_dropped_with_one_line(option, value):
    for kind in KINDS:
        _, said = made(block(kind, **{option: value}))
        assert f"{option}: dropped" in said and "\n" not in said


def test_bias_correction_is_honoured_and_said_aloud():
    for kind in KINDS:
        optimizer, said = made(block(kind, bias_correction=True))
        assert optimizer.bias_correction and "ignored it" in said
        assert made(block(kind, bias_correction=False))[1] == ""


@holds_for_each([("amsgrad",), ("eps_inside_sqrt",)])
def test_what_was_never_done_is_refused_and_may_be_false(option):
    for kind in KINDS:
        with pytest.raises(ValueError, match=option):
            made(block(kind, **{option: True}))
        assert made(block(kind, **{option: False}))[1] == ""


def test_gradient_clipping_is_the_optimizers():
    config = {"gradient_clipping": 1.5, "optimizer": block("OneBitAdam")}
    assert made(config)[0].max_grad_norm == 1.5
    assert made(config | {"gradient_clipping": 0})[0].max_grad_norm is None
    optimizer, said = made({"optimizer": block("OneBitAdam")})
    assert optimizer.max_grad_norm == 1.0 and "gradient_clipping is missing" in said
    assert made(block("OneBitAdam"))[0].max_grad_norm is None  # a block alone says nothing


def test_a_max_grad_norm_in_the_block_is_honoured_and_said_aloud():
    config = {"optimizer": block("OneBitAdam", max_grad_norm=0.5)}
    optimizer, said = made(config)
    assert optimizer.max_grad_norm == 0.5 and "max_grad_norm" in said
    with pytest.raises(ValueError, match="keep one"):
        made(config | {"gradient_clipping": 1.0})
    assert made(block("OneBitAdam", max_grad_norm=0.0))[1] == ""


@pytest.mark.parametrize(
    "option",
    [
        {"prescale_gradients": True},
        {"communication_data_type": "fp16"},
        {"gradient_predivide_factor": 2.0},
        {"fp32_allreduce": True},
    ],
)
def test_how_the_engine_averaged_is_said_to_be_dropped(option):
    config = {"optimizer": block("OneBitAdam"), **option}
    (name,) = option
    assert f"{name}: dropped" in made(config)[1]
    assert name not in engine_config(config)


@holds_for_each([(1,), (2,), (3,)])
def test_zero_is_refused_with_the_reason_and_what_to_use(stage):
    config = {"optimizer": block("OneBitAdam"), "zero_optimization": {"stage": stage}}
    for read in (made, engine_config):
        with pytest.raises(ValueError, match=f"stage is {stage}.*shard.*Set the stage to 0"):
            read(config)
    config |= {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.0}
    assert made(config)[1] == "" and engine_config(config)


@pytest.mark.parametrize(
    ("option", "text"),
    [({"sparse_gradients": True}, "sparse"), ({"gradient_allreduce_op": "sum"}, "averages")],
)
def test_options_of_the_engine_that_cannot_be_had_are_refused(option, text):
    for read in (made, engine_config):
        with pytest.raises(ValueError, match=text):
            read({"optimizer": block("OneBitAdam"), **option})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("freez_step", "freeze_step"), ("weight_deacy", "weight_decay"), ("warmup", "freeze_step")],
)
def test_an_option_that_never_existed_is_an_error_that_names_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=f"{wrong}.*"):
        made(block("OneBitAdam", **{wrong: 1}))
    if wrong != "warmup":
        with pytest.raises(ValueError, match=f"did you mean '{right}'"):
            made(block("OneBitAdam", **{wrong: 1}))


def test_an_option_of_another_block_is_an_error():
    with pytest.raises(ValueError, match="OneBitAdam never had an option 'max_coeff'"):
        made(block("OneBitAdam", max_coeff=1.0))


def test_an_unknown_type_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'OneBitAdam'"):
        made({"type": "OneBitAdm", "params": {}})
    with pytest.raises(ValueError, match="not one that DeepSpeed removed"):
        made({"optimizer": {"type": "SGD"}})
    with pytest.raises(ValueError, match="no optimizer block"):
        made({"train_batch_size": 8})


def test_auto_asks_for_the_value_unless_it_is_given():
    config = {"optimizer": block("OneBitAdam", lr="auto"), "gradient_clipping": "auto"}
    with pytest.raises(ValueError, match='optimizer.params.lr is "auto"|gradient_clipping is'):
        made(config)
    optimizer, _ = made(config, lr=0.5, max_grad_norm=2.0)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.max_grad_norm == 2.0


def test_options_given_override_the_file():
    optimizer, said = made({"type": "OneBitAdam", "params": {"lr": 1.0}}, warmup=math.inf)
    assert optimizer.warmup.steps == math.inf and "freeze_step" not in said


def test_a_file_is_read_and_its_errors_are_named(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"gradient_clipping": 1.0, "optimizer": block("OneBitAdam")}))
    assert made(str(path))[0].max_grad_norm == 1.0
    path.write_text('{"optimizer": {}, "optimizer": {}}')
    with pytest.raises(ValueError, match="optimizer more than once"):
        made(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        made(path)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "none.json"))):
        made(tmp_path / "none.json")


def test_engine_config_is_a_copy_without_what_attach_takes_over():
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "optimizer": block("OneBitAdam"),
    }
    left = engine_config(config)
    kept = {name: config[name] for name in ("train_batch_size", "fp16", "scheduler")}
    assert left == kept | {"zero_optimization": {"stage": 0}}
    left["fp16"]["enabled"] = False
    assert config["fp16"]["enabled"] and "optimizer" in config


def test_groups_are_taken_as_old_scripts_write_them():
    first, second = params()
    mask = torch.zeros(4, 3)
    groups = [
        {"params": [first], "weight_decay": 0.5, "exp_avg_mask": mask},
        {"params": [second], "weight_decay": 0.0, "non_freeze": True},
    ]
    optimizer = from_config(block("OneBitAdam"), groups, communicator=Single())
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
    assert [g["compress"] for g in optimizer.param_groups] == [True, False]
    assert optimizer.param_groups[0]["exp_avg_mask"] is mask
    with pytest.raises(ValueError, match="shape"):
        from_config(
            block("OneBitAdam"),
            [{"params": [second], "exp_avg_mask": mask}],
            communicator=Single(),
        )
    with pytest.raises(ValueError, match="max_coeff.*whole optimizer"):
        from_config(
            block("OneBitLamb"), [{"params": [second], "max_coeff": 1.0}], communicator=Single()
        )


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_the_momentum_stays_zero_where_the_mask_is(kind):
    torch.manual_seed(0)
    p, mask = torch.nn.Parameter(torch.ones(4, 3)), torch.ones(4, 3)
    mask[2:] = 0
    groups = [{"params": [p], "exp_avg_mask": mask}]
    optimizer = from_config(block(kind), groups, communicator=Single())
    for step in range(12):
        p.grad = torch.randn(4, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        momentum = optimizer.state_dict()["state"][0]["exp_avg"]
        assert not momentum[2:].any() and momentum[:2].all(), step
    assert (p[2:] == 1).all() and (p[:2] != 1).all()


def test_the_mask_is_the_runs_and_not_the_files():
    def run(rows, state=None):
        p, mask = torch.nn.Parameter(torch.ones(4, 3)), torch.zeros(4, 3)
        mask[:rows] = 1
        groups = [{"params": [p], "exp_avg_mask": mask}] if rows else [p]
        optimizer = from_config(block("OneBitAdam"), groups, communicator=Single())
        if state:
            optimizer.load_state_dict(state)
        for _ in range(9):
            p.grad = torch.randn(4, 3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        return optimizer

    torch.manual_seed(0)
    wide = run(3)
    narrow = run(1, wide.state_dict())
    momentum = narrow.state_dict()["state"][0]["exp_avg"]
    assert momentum[:1].all() and not momentum[1:].any()
    assert narrow.param_groups[0]["exp_avg_mask"][:, 0].tolist() == [1, 0, 0, 0]
    without = run(0, wide.state_dict())
    assert "exp_avg_mask" not in without.param_groups[0]


def test_a_floor_under_the_variance_contradicts_a_mask():
    groups = [{"params": params()[:1], "exp_avg_mask": torch.ones(4, 3)}]
    with pytest.raises(ValueError, match="contradict"):
        from_config(block("OneBitAdam"), groups, communicator=Single(), variance_floor=1e-3)
