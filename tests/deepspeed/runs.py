"""What runs on each rank in the tests with the real engine: small models, seeded data."""

import warnings

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
QUIET = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None}


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


def raised(function, *args, **kwargs):
    """(type, text) of what the function raises; None if nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
