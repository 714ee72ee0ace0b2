"""1-bit Adam in DeepSpeed's engine, from a configuration of before its removal.

    torchrun --nproc-per-node 2 examples/deepspeed_engine.py                  # needs gloo only
    torchrun --nproc-per-node 2 examples/deepspeed_engine.py --save /tmp/run  # saves at the end
    torchrun --nproc-per-node 2 examples/deepspeed_engine.py --load /tmp/run  # goes on from there

An MLP predicts the next character of Python's documentation. Only the call of initialize differs
from the old script, and attach follows it. DeepSpeed must be installed: pip install deepspeed, or
python scripts/install_deepspeed.py, whose folder belongs into PYTHONPATH. On a machine without GPUs
set DS_ACCELERATOR=cpu.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import deepspeed
import torch

import onebit

CONTEXT = 16  # characters that the next one is predicted from
CONFIG = Path(__file__).with_name("ds_config.json")


def make_model():
    torch.manual_seed(0)  # the same on all ranks
    return torch.nn.Sequential(
        torch.nn.Embedding(128, 16),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * CONTEXT, 128),
        torch.nn.Tanh(),
        torch.nn.Linear(128, 128),
    )


def batches(size, seed):
    """Endless (characters before, character after)."""
    text = torch.tensor([min(ord(c), 127) for c in "".join(topics.values())])
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (size,), generator=generator)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        yield window[:, :-1], window[:, -1]


def make_engine(config):
    """The two lines: a given optimizer and the rest of the file; then attach."""
    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=onebit.deepspeed.from_config(config, model.parameters()),
        config=onebit.deepspeed.engine_config(config),
    )
    return onebit.deepspeed.attach(engine)


def train(engine, steps):
    data = batches(engine.train_micro_batch_size_per_gpu(), 100 * engine.global_steps + rank())
    optimizer = engine.basic_optimizer
    while engine.global_steps < steps:
        x, y = (tensor.to(engine.device) for tensor in next(data))
        loss = torch.nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        is_step = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_step and engine.global_steps % 20 == 0 and rank() == 0:
            sent = optimizer.communication.last_step.bytes_sent
            print(
                f"step {engine.global_steps}: loss {loss.item():.3f}, {optimizer.phase}, "
                f"{sent:,} bytes sent a step",
                flush=True,
            )


def rank():
    return torch.distributed.get_rank()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=CONFIG, type=Path)
    parser.add_argument("--steps", default=100, type=int)
    parser.add_argument("--save", metavar="DIR")
    parser.add_argument("--load", metavar="DIR")
    options = parser.parse_args()
    deepspeed.init_distributed()
    engine = make_engine(options.config)
    if options.load:
        engine.load_checkpoint(options.load)
    train(engine, options.steps)
    if options.save:
        engine.save_checkpoint(options.save)


if __name__ == "__main__":
    main()
