"""What runs on each rank in the tests with the real engine: small models, seeded data."""

import importlib.util
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import onebit
import onebit.deepspeed

KINDS = {
    "OneBitAdam": {"freeze_step": 4},
    "ZeroOneAdam": {
        "var_freeze_step": 4,
        "var_update_scaler": 1,
        "local_step_scaler": 2,
        "local_step_clipper": 4,
    },
    "OneBitLamb": {"freeze_step": 4},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
QUIET = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None}  # clips to 1.0 by default


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5))


def old_config(kind, dtype="fp32", **more):
    """A configuration as its users have it."""
    params = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.01, **KINDS[kind]}
    config = {**QUIET, "optimizer": {"type": kind, "params": params}, **more}
    return config | ({dtype: {"enabled": True}} if dtype != "fp32" else {})


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def single_optimizer():
    """An optimizer of one rank, with gradients, that compresses after one step."""
    model = small_model()
    loss_of(model(torch.ones(4, 6))).backward()
    options = {"warmup": 1, "communicator": onebit.comm.Single()}
    return onebit.OneBitAdam(model.parameters(), **options)


def make_engine(config, groups=None, attach=True, model=None, **options):
    """An engine as an old script makes it, but for the call of initialize."""
    import deepspeed

    model = model or small_model()
    params = groups(model) if groups else model.parameters()
    optimizer = quietly(onebit.deepspeed.from_config, config, params, **options)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=onebit.deepspeed.engine_config(config)
    )
    return onebit.deepspeed.attach(engine) if attach else engine


def batch(step, dtype=torch.float32):
    """Rank-seeded data: rank 1 has larger gradients than rank 0."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(4, 6, generator=generator) * (1 + 2 * rank)).to(dtype)


def loss_of(output):
    return (output.float() - 1).square().mean()


def train(engine, steps, dtype="fp32"):
    """Train in these steps, each with the engine's own accumulation; returns the losses."""
    losses = []
    parts = engine.gradient_accumulation_steps()
    for step in steps:
        for part in range(parts):
            loss = loss_of(engine(batch(step * parts + part, DTYPES[dtype])))
            quietly(engine.backward, loss)
            quietly(engine.step)
        losses.append(loss.item())
    return losses


def numbers(engine):
    """All that must be equal: parameters, their float32 copies and the whole optimizer state."""
    optimizer = engine.basic_optimizer
    state = optimizer.state_dict()["state"]
    copies = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "model": [p.detach().clone() for p in engine.module.parameters()],
        "copies": [p.detach().clone() for p in copies],
        "state": {
            f"{i} {k}": torch.as_tensor(x).clone() for i, e in state.items() for k, x in e.items()
        },
        "scale": getattr(engine.optimizer, "loss_scale", None),
        "phase": optimizer.phase,
        "steps": optimizer.steps,
    }


def trained(kind, dtype, steps, config=None, groups=None, **options):
    """(numbers, losses, bytes of the last step) of an engine after so many steps."""
    engine = make_engine(old_config(kind, dtype, **(config or {})), groups, **options)
    losses = train(engine, range(steps), dtype)
    sent = engine.basic_optimizer.communication.last_step.bytes_sent
    return numbers(engine), losses, sent


def trained_plainly(kind, steps, accumulate=1, **options):
    """The same without an engine: a loop, and the optimizer that the configuration gives."""
    model = small_model()
    optimizer = quietly(
        onebit.deepspeed.from_config, old_config(kind), model.parameters(), **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            (loss_of(model(batch(step * accumulate + part))) / accumulate).backward()
        quietly(optimizer.step)
    return [p.detach() for p in model.parameters()], optimizer.communication.last_step.bytes_sent


def trained_with_norm(kind, steps, accumulate, norm):
    return trained_plainly(kind, steps, accumulate, max_grad_norm=norm)


def interrupted(kind, dtype, before, after, folder, config=None, groups=None):
    """Save after `before` steps, load into a new engine, and go on: (numbers, losses)."""
    config = old_config(kind, dtype, **(config or {}))
    engine = make_engine(config, groups)
    train(engine, range(before), dtype)
    quietly(engine.save_checkpoint, folder)
    engine = make_engine(config, groups)
    path, _ = engine.load_checkpoint(folder)
    losses = train(engine, range(before, before + after), dtype)
    return numbers(engine), losses, path


def saved(kind, steps, folder, synchronize=False, groups=None, dtype="fp32"):
    engine = make_engine(old_config(kind, dtype), groups)
    train(engine, range(steps), dtype)
    if synchronize:
        engine.basic_optimizer.synchronize()
    quietly(engine.save_checkpoint, folder)
    return numbers(engine)


def loaded(kind, folder, steps=0, config=None, groups=None, dtype="fp32", first=0, **options):
    """A new engine from a saved one: (what load_checkpoint raised or None, numbers, losses)."""
    engine = make_engine(old_config(kind, dtype, **(config or {})), groups, **options)
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        return str(error), None, None
    before = numbers(engine)
    return None, before, train(engine, range(first, first + steps), dtype)


def loaded_into_warmup(folder):
    return loaded("OneBitAdam", folder, 3, first=6, warmup=20)


def raised(function, *args, **kwargs):
    """(type, text) of what the function raises; None if nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def gradients_after(kind, managed):
    """The ranks' gradients before the step, after all that might have averaged them."""
    engine = make_engine(old_config(kind, gradient_accumulation_steps=2))
    engine.backward(loss_of(engine(batch(0))))
    engine.step()
    if managed == "no_sync":
        with engine.no_sync():
            engine.backward(loss_of(engine(batch(1))))
    else:
        engine.backward(loss_of(engine(batch(1))))
    engine.allreduce_gradients()
    return [p.grad.clone() for p in engine.module.parameters()]


def plain_engine(config):
    """An engine with an optimizer that was made by hand and not passed through `prepare`."""
    import deepspeed

    model = small_model()
    optimizer = onebit.OneBitAdam(model.parameters(), warmup=4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=QUIET | config)[0]


def forgotten(is_plain):
    """What the second step of an engine without attach raises; and what the first one does."""
    engine = plain_engine({}) if is_plain else make_engine(old_config("OneBitAdam"), attach=False)
    return [raised(train, engine, [0]), raised(train, engine, [1])]


def unprepared():
    """What initialize raises of a plain optimizer in half precision."""
    return [raised(plain_engine, {dtype: {"enabled": True}}) for dtype in ("fp16", "bf16")]


def refusals():
    """What attach raises, by what is wrong."""
    import deepspeed

    def engine_of(config, optimizer=None):
        model = small_model()
        return deepspeed.initialize(
            model=model,
            optimizer=(optimizer or adam)(model.parameters()),
            config=QUIET | {"zero_allow_untested_optimizer": True} | config,
        )[0]

    def adam(params, **options):
        return onebit.OneBitAdam(params, warmup=4, **options)

    found = {
        f"ZeRO {stage}": engine_of({"zero_optimization": {"stage": stage}}) for stage in (1, 2)
    }
    found["torch"] = engine_of({}, torch.optim.SGD)
    found["group"] = engine_of({}, lambda p: adam(p, communicator=onebit.comm.Single()))
    found["overlap"] = engine_of({}, lambda p: adam(p, overlap=True))
    found["lacking"] = engine_of({}, lambda p: adam(list(p)[:2]))
    clipped = {"gradient_clipping": 1.0}
    found["clipping"] = engine_of(clipped, lambda p: adam(p, max_grad_norm=2.0))
    found["experts"] = engine_of({})
    found["experts"].has_moe_layers = True
    found["model"] = small_model()
    return {name: raised(onebit.deepspeed.attach, engine) for name, engine in found.items()}


def overflowing(kind, folder):
    """fp16: rank 1's loss overflows in two steps; saves at each step.

    Returns for each step (skipped, scale, steps taken, learning rate), and the numbers at the end;
    and those of an engine that is loaded from the save after the overflows and goes on.
    """
    config = old_config(kind, "fp16", fp16={"enabled": True, "loss_scale_window": 100})
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine, seen = make_engine(config), []
    for step in range(8):
        loss = loss_of(engine(batch(step, torch.float16)))
        bad = step in (2, 5) and dist.get_rank() == 1
        quietly(engine.backward, loss * (1e6 if bad else 1))
        quietly(engine.step)
        wrapper = engine.optimizer
        taken = engine.basic_optimizer.steps
        seen.append((wrapper.overflow, wrapper.loss_scale, taken, engine.get_lr()[0]))
        quietly(engine.save_checkpoint, folder)
    resumed = make_engine(config)
    resumed.load_checkpoint(folder, tag="global_step6")
    train(resumed, [6, 7], "fp16")
    return seen, numbers(engine), numbers(resumed)


def masked(rows):
    """Groups as the old BERT scripts write them: only the first `rows` rows of one weight train."""

    def groups(model):
        first, *others = model.parameters()
        mask = torch.zeros_like(first)
        mask[:rows] = 1
        return [{"params": [first], "exp_avg_mask": mask}, {"params": others, "weight_decay": 0.0}]

    return groups


def another_mask(dtype, folder):
    """The first momentum with mask 10, after loading it with mask 3, then without any mask."""
    train(engine := make_engine(old_config("OneBitAdam", dtype), masked(10)), range(6), dtype)
    quietly(engine.save_checkpoint, folder)
    found = [numbers(engine)["state"]["0 exp_avg"]]
    for groups in (masked(3), _plain):
        engine = make_engine(old_config("OneBitAdam", dtype), groups)
        engine.load_checkpoint(folder)
        train(engine, [6], dtype)
        found.append(numbers(engine)["state"]["0 exp_avg"])
    return found, [("exp_avg_mask" in g) for g in engine.basic_optimizer.param_groups]


def _plain(model):
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others, "weight_decay": 0.0}]


def monitored(folder):
    """Steps with DeepSpeed's CSV monitor."""
    csv = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    engine = make_engine(old_config("OneBitAdam", csv_monitor=csv))
    train(engine, range(6))
    return engine.basic_optimizer.communication.last_step


class Scale(torch.nn.Module):
    def forward(self, x):
        return x.tanh()


def pipeline(stages, folder=None, load=False, steps=7):
    """A pipeline of two layers: (parameters of this stage, losses, bytes of the last step)."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 12), Scale(), torch.nn.Linear(12, 5)]
    model = PipelineModule(
        layers, num_stages=stages, loss_fn=lambda y, target: (y - target).square().mean()
    )
    group = model.mpu().get_data_parallel_group()
    config = old_config("OneBitAdam", gradient_accumulation_steps=2, gradient_clipping=0.2)
    optimizer = quietly(
        onebit.deepspeed.from_config,
        config,
        model.parameters(),
        communicator=onebit.comm.TorchDistributed(group),
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=onebit.deepspeed.engine_config(config)
    )
    onebit.deepspeed.attach(engine)
    replica = model.mpu().get_data_parallel_rank()
    first, losses = 0, []
    if load:
        engine.load_checkpoint(folder)
        first = engine.global_steps
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(100 * step + replica)
        data = [(torch.randn(4, 6, generator=generator), torch.ones(4, 5)) for _ in range(2)]
        losses.append(float(quietly(engine.train_batch, iter(data))))
        if folder and not load and step == 4:
            quietly(engine.save_checkpoint, folder)
    stage = model.mpu().get_stage_id()
    parameters = [p.detach().clone() for p in model.parameters()]
    return stage, parameters, losses, optimizer.communication.last_step.bytes_sent


def load_example(name):
    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(folder):
    """examples/deepspeed_engine.py: 44 steps at once, and 42 that are saved and gone on with."""
    module = load_example("deepspeed_engine")
    engine = quietly(module.make_engine, module.CONFIG)
    quietly(module.train, engine, 42)
    quietly(engine.save_checkpoint, folder)
    resumed = quietly(module.make_engine, module.CONFIG)
    resumed.load_checkpoint(folder)
    at_save = numbers(engine), numbers(resumed)
    quietly(module.train, resumed, 44)
    return *at_save, resumed.basic_optimizer.steps


def accelerated(steps):
    """As `trained` with 1-bit Adam in float32, in an engine that Accelerate makes."""
    from accelerate import Accelerator, DeepSpeedPlugin

    config, model = old_config("OneBitAdam"), small_model()
    optimizer = quietly(onebit.deepspeed.from_config, config, model.parameters())
    plugin = DeepSpeedPlugin(hf_ds_config=onebit.deepspeed.engine_config(config))
    accelerator = onebit.deepspeed.attach_on_prepare(Accelerator(deepspeed_plugin=plugin))
    engine, wrapped = accelerator.prepare(model, optimizer)
    for step in range(steps):
        quietly(accelerator.backward, loss_of(engine(batch(step))))
        wrapped.step()
        wrapped.zero_grad()
    return numbers(engine)


def plain_accelerator():
    from accelerate import Accelerator

    return raised(onebit.deepspeed.attach_on_prepare, Accelerator(cpu=True))


def with_trainer(folder):
    """examples/deepspeed_trainer.py: 24 steps, and the last four of them after a checkpoint."""
    module, found = load_example("deepspeed_trainer"), []
    for checkpoint in (None, f"{folder}/checkpoint-20"):
        trainer = module.make_trainer(folder, steps=24, disable_tqdm=True)
        quietly(trainer.train, resume_from_checkpoint=checkpoint)
        found.append(numbers(trainer.model_wrapped))
    return found
