"""Train a small language model with 1-bit Adam over several processes. Needs torch and onebit only.

    torchrun --nproc-per-node 2 examples/train_ddp.py

The model predicts the next character of Python's own documentation, so nothing is downloaded. The
script runs on CPUs over gloo, in less than a minute on two cores. It prints the loss, the phase of
the optimizer and the bytes that each process sends in a step: the warm-up sends every gradient in
full, and the steps after it send one bit for each parameter.

A run this short ends its warm-up while the variance still changes, and the optimizer warns about
it. In a real run, take 15 to 25 % of all steps; docs/using.md says more.

Three lines differ from a script with torch.optim.AdamW; they are marked with "onebit".
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import onebit

CONTEXT = 16  # characters from which the next one is predicted


def make_model() -> nn.Module:
    """A multilayer perceptron of about 1.1 million parameters."""
    return nn.Sequential(
        nn.Embedding(128, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, 1024),
        nn.ReLU(),
        nn.Linear(1024, 384),
        nn.ReLU(),
        nn.Linear(384, 128),
    )


def sample(text: torch.Tensor, batch: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random windows of the text: contexts [batch, CONTEXT] and their next characters [batch]."""
    starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return [windows[:, :CONTEXT], windows[:, CONTEXT]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=80, help="steps of exact Adam")
    parser.add_argument("--batch", type=int, default=128, help="examples for each process and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", help="file for the checkpoint that all processes share")
    return parser.parse_args()


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = torch.tensor(list("".join(topics.values()).encode("ascii", "replace")))
    generator = torch.Generator().manual_seed(rank)  # each process draws other examples

    model = DistributedDataParallel(make_model())
    optimizer = onebit.OneBitAdam(  # onebit: instead of torch.optim.AdamW
        model.parameters(),
        lr=options.lr,
        betas=(0.9, 0.98),
        warmup=options.warmup,
        variance_floor=1e-3,
    )
    onebit.ddp.attach(model, optimizer)  # onebit: the optimizer averages, not DDP

    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        contexts, targets = sample(text, options.batch, generator)
        loss = cross_entropy(model(contexts), targets)
        loss.backward()
        phase = optimizer.phase  # of the step that follows
        optimizer.step()
        if rank == 0 and (step % 40 == 0 or step == 1):
            sent = optimizer.communication.last_step.bytes_sent
            print(f"step {step:4}  loss {loss.item():.3f}  {phase:10}  {sent:9,} bytes sent")

    optimizer.synchronize()  # onebit: afterwards one checkpoint serves all processes
    if rank == 0:
        total = optimizer.communication
        print(f"sent {total.bytes_sent:,} bytes in all, 1/{total.compression_ratio:.2f} of Adam's")
        if options.save:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
