"""1-bit Adam in Hugging Face's Trainer with DeepSpeed, from a configuration of before its removal.

    torchrun --nproc-per-node 2 examples/deepspeed_trainer.py --output /tmp/run
    torchrun --nproc-per-node 2 examples/deepspeed_trainer.py --output /tmp/run --resume

A small GPT-2 with random weights learns the bytes of Python's documentation; no download. Needs
transformers, accelerate and DeepSpeed. On a machine without GPUs set DS_ACCELERATOR=cpu.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import onebit

CONFIG = Path(__file__).with_name("ds_config_trainer.json")
LENGTH = 32


class Text(torch.utils.data.Dataset):
    """Windows of the documentation, as bytes."""

    def __init__(self):
        text = "".join(topics.values()).encode()[: 400 * LENGTH]
        self.rows = torch.tensor(list(text)).view(-1, LENGTH)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def make_model():
    set_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout))


class OneBitTrainer(Trainer):
    """With DeepSpeed the Trainer ignores `optimizers=`: it calls this method."""

    def __init__(self, config, *args, **options):
        self.config = config
        super().__init__(*args, **options)

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            params, lr = self.model.named_parameters(), self.args.learning_rate
            self.optimizer = onebit.deepspeed.from_config(self.config, params, lr=lr)
        return self.optimizer


def make_trainer(output, config=CONFIG, steps=30, **options):
    """As without onebit, but for the optimizer, the configuration and attach_on_prepare."""
    arguments = TrainingArguments(
        output_dir=output,
        deepspeed=onebit.deepspeed.engine_config(config),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        max_grad_norm=0,  # the optimizer clips, by gradient_clipping of the file
        max_steps=steps,
        save_steps=20,
        logging_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        **options,
    )
    trainer = OneBitTrainer(config, make_model(), arguments, train_dataset=Text())
    onebit.deepspeed.attach_on_prepare(trainer.accelerator)
    return trainer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    options = parser.parse_args()
    trainer = make_trainer(options.output)
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        optimizer = trainer.model_wrapped.basic_optimizer
        print(f"{optimizer.phase}, {optimizer.communication.last_step.bytes_sent:,} bytes a step")


if __name__ == "__main__":
    main()
