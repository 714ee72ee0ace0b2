"""1-bit Adam in the Hugging Face Trainer: a causal language model on several processes.

A tiny model on Python's own documentation, without a network, in seconds:

    torchrun --nproc-per-node 2 examples/hf_trainer.py --out /tmp/gpt

GPT-2 on WikiText-103 from the Hugging Face hub:

    torchrun --nproc-per-node 8 examples/hf_trainer.py --out DIR --model gpt2 \\
        --data wikitext:wikitext-103-raw-v1 --steps 20000 --warmup 4000

Three things differ from a script with torch.optim.AdamW:

1. The optimizer is given to the Trainer.
2. max_grad_norm is given to the optimizer, and 0 to the Trainer. The Trainer would clip by each
   process's own norm and so change what the processes average. The grad_norm that it logs is that
   of process 0 alone.
3. A callback attaches the Trainer's DistributedDataParallel to the optimizer, and calls
   `synchronize` before the Trainer saves.

`--resume` continues from the last checkpoint in --out.
"""

import argparse
from pydoc_data.topics import topics  # Python's own documentation

import datasets
import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import onebit

LENGTH = 64  # tokens of an example


class OneBitCallback(transformers.TrainerCallback):
    """Tells the Trainer's model and checkpoints about the optimizer.

    The optimizer averages the gradients, so the Trainer's DistributedDataParallel must not. Part of
    its state belongs to each process, so the processes synchronize before process 0 saves.

    Args:
        trainer: its DistributedDataParallel is attached to the optimizer when training begins.
        optimizer: an optimizer of onebit.
    """

    def __init__(self, trainer: transformers.Trainer, optimizer: torch.optim.Optimizer):
        self.trainer, self.optimizer = trainer, optimizer

    def on_train_begin(self, args, state, control, **kwargs):
        if args.save_strategy == "best":
            raise ValueError(
                "save_strategy='best' decides to save after the last callback has run, so the "
                "optimizer cannot be synchronized before: set save_strategy='steps' or 'epoch'"
            )
        if args.world_size != self.optimizer.communicator.size:
            raise RuntimeError(
                f"the Trainer has {args.world_size} processes, but the optimizer has "
                f"{self.optimizer.communicator.size}. Start the script with torchrun, make the "
                "optimizer after TrainingArguments, and set use_cpu=True if there is no GPU"
            )
        if args.world_size > 1:
            onebit.ddp.attach(self.trainer.model_wrapped, self.optimizer)

    def on_step_end(self, args, state, control, **kwargs):
        """Synchronize before the Trainer saves process 0's state for all processes."""
        if control.should_save:
            self.optimizer.synchronize()

    on_epoch_end = on_step_end

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            sent = self.optimizer.communication.last_step.bytes_sent
            phase = self.optimizer.phase
            print(
                f"step {state.global_step}: loss {logs['loss']:.3f}, {phase}, {sent:,} bytes sent"
            )


def characters(text: str) -> tuple[datasets.Dataset, int]:
    """A data set of examples of LENGTH bytes, and the size of the vocabulary."""
    ids = list(text.encode())
    return datasets.Dataset.from_dict(
        {"input_ids": [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]}
    ), 256


def tokens(name: str, model: str) -> datasets.Dataset:
    """Examples of LENGTH tokens from a data set on the hub, `name` or `name:configuration`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = datasets.load_dataset(*name.split(":"), split="train")

    def cut(batch):
        ids = sum(tokenizer(batch["text"])["input_ids"], [])
        return {"input_ids": [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]}

    return text.map(cut, batched=True, remove_columns=text.column_names)


def tiny_model(vocabulary: int) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of 28 thousand parameters without dropout."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def collate(examples: list[dict]) -> dict:
    batch = transformers.default_data_collator(examples)
    return batch | {"labels": batch["input_ids"]}


def make_trainer(
    options: argparse.Namespace,
) -> tuple[transformers.Trainer, onebit.OneBitAdam]:
    """The Trainer, ready to train, and its optimizer."""
    arguments = transformers.TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        save_steps=options.save_steps,
        logging_steps=options.log_steps,
        save_strategy="steps",
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        seed=options.seed,
        bf16=options.bf16,
        use_cpu=options.cpu or not torch.cuda.is_available(),
        max_grad_norm=0,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
    )  # also makes the process group, which the optimizer needs
    transformers.set_seed(options.seed)  # the same model in all processes
    if options.model:
        data = tokens(options.data, options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    else:
        data, vocabulary = characters("".join(topics.values()))
        model = tiny_model(vocabulary)
    model.to(arguments.device)  # first: the optimizer's state lies where the parameters do
    optimizer = onebit.OneBitAdam(
        model.named_parameters(),
        lr=options.lr,
        betas=(0.9, options.beta2),
        weight_decay=0.01,
        warmup=options.warmup,
        max_grad_norm=options.max_grad_norm,
        variance_floor=1e-3,  # for rare tokens
    )
    scheduler = transformers.get_linear_schedule_with_warmup(
        optimizer, options.steps // 10, options.steps
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        data_collator=collate,
        optimizers=(optimizer, scheduler),
    )
    trainer.remove_callback(transformers.PrinterCallback)  # OneBitCallback prints more
    trainer.add_callback(OneBitCallback(trainer, optimizer))
    return trainer, optimizer


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, help="folder of the checkpoints")
    add(
        "--model",
        help="a causal language model on the hub; default: a tiny model with random weights",
    )
    add(
        "--data",
        default="wikitext:wikitext-2-raw-v1",
        help="a data set on the hub, read with --model; else Python's documentation is read",
    )
    add("--steps", type=int, default=200)
    add("--warmup", type=int, default=50, help="steps of exact Adam before the variance is frozen")
    add("--lr", type=float, default=3e-3)
    add("--beta2", type=float, default=0.95, help="0.999 for runs of many thousand steps")
    add("--max-grad-norm", type=float, default=1.0)
    add("--batch", type=int, default=8, help="examples for each process and pass")
    add("--accumulate", type=int, default=2, help="backward passes for each step")
    add("--save-steps", type=int, default=100)
    add("--log-steps", type=int, default=10)
    add("--seed", type=int, default=1)
    add("--bf16", action="store_true")
    add("--cpu", action="store_true", help="do not use GPUs")
    add("--resume", action="store_true", help="continue from the last checkpoint in --out")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    trainer, _ = make_trainer(options)
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(options.out) if options.resume else None
    )
    trainer.save_model()


if __name__ == "__main__":
    main()
