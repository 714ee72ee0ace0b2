"""1-bit Adam in the Hugging Face Trainer: a causal language model on several processes.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --out /tmp/gpt                       # tiny model and text, no network, seconds
    torchrun --nproc-per-node 8 examples/hf_trainer.py --out DIR --model gpt2 --data wikitext:wikitext-103-raw-v1 --steps 20000 --warmup 4000

Three things differ from a script without it: the optimizer is given to the Trainer; max_grad_norm is given to the optimizer, and 0 to the
Trainer, which would clip by each rank's own norm and so change what the ranks average (what it logs as grad_norm is still rank 0's own);
and a callback attaches the Trainer's DistributedDataParallel. `--resume` goes on from the last checkpoint in --out.
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
    """What the Trainer does not know of the optimizer: it averages the gradients, and part of its state is each rank's own.

    Args:
        trainer: whose DistributedDataParallel is attached when training begins.
        optimizer: one of onebit's.
    """

    def __init__(self, trainer, optimizer):
        self.trainer, self.optimizer = trainer, optimizer

    def on_train_begin(self, args, state, control, **kwargs):
        if args.save_strategy == "best":
            raise ValueError(
                "save_strategy='best' decides to save after the last callback: set 'steps' or 'epoch'"
            )
        if args.world_size != self.optimizer.communicator.size:
            raise RuntimeError(
                f"the Trainer has {args.world_size} processes, the optimizer {self.optimizer.communicator.size}: start the script "
                "with torchrun, make the optimizer after TrainingArguments, and set use_cpu=True where there is no GPU"
            )
        if args.world_size > 1:
            onebit.ddp.attach(self.trainer.model_wrapped, self.optimizer)

    def on_step_end(self, args, state, control, **kwargs):
        """The Trainer saves rank 0's state for all ranks, after this."""
        if control.should_save:
            self.optimizer.synchronize()

    on_epoch_end = on_step_end

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            sent = self.optimizer.communication.last_step.bytes_sent
            print(
                f"step {state.global_step}: loss {logs['loss']:.3f}, {self.optimizer.phase}, {sent:,} bytes sent a step"
            )


def characters(text):
    """Examples of LENGTH characters, the vocabulary being bytes."""
    ids = list(text.encode())
    return datasets.Dataset.from_dict(
        {"input_ids": [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]}
    ), 256


def tokens(name, model):
    """Examples of LENGTH tokens of a data set on the hub, `name` or `name:configuration`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = datasets.load_dataset(*name.split(":"), split="train")

    def cut(batch):
        ids = sum(tokenizer(batch["text"])["input_ids"], [])
        return {"input_ids": [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]}

    return text.map(cut, batched=True, remove_columns=text.column_names)


def tiny_model(vocabulary):
    """28 thousand parameters, without dropout."""
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


def collate(examples):
    batch = transformers.default_data_collator(examples)
    return batch | {"labels": batch["input_ids"]}


def make_trainer(options):
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
    )  # makes the process group, too, which the optimizer needs
    transformers.set_seed(options.seed)  # the same model on all ranks
    if options.model:
        data, model = (
            tokens(options.data, options.model),
            transformers.AutoModelForCausalLM.from_pretrained(options.model),
        )
    else:
        data, vocabulary = characters("".join(topics.values()))
        model = tiny_model(vocabulary)
    model.to(arguments.device)  # before the optimizer, whose state lies where the parameters do
    optimizer = onebit.OneBitAdam(
        model.named_parameters(),
        lr=options.lr,
        betas=(0.9, options.beta2),
        weight_decay=0.01,
        warmup=options.warmup,
        max_grad_norm=options.max_grad_norm,
        variance_floor=1e-3,
    )  # the floor is for tokens that are rare
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


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, help="folder of the checkpoints")
    add(
        "--model",
        help="a causal language model on the hub; by default a tiny one with random weights",
    )
    add(
        "--data",
        default="wikitext:wikitext-2-raw-v1",
        help="a data set on the hub, for --model; without one, Python's documentation",
    )
    add("--steps", type=int, default=200)
    add("--warmup", type=int, default=50, help="steps of exact Adam before the variance is frozen")
    add("--lr", type=float, default=3e-3)
    add("--beta2", type=float, default=0.95, help="0.999 for runs of many thousand steps")
    add("--max-grad-norm", type=float, default=1.0)
    add("--batch", type=int, default=8, help="examples a process and pass")
    add("--accumulate", type=int, default=2, help="passes a step")
    add("--save-steps", type=int, default=100)
    add("--log-steps", type=int, default=10)
    add("--seed", type=int, default=1)
    add("--bf16", action="store_true")
    add("--cpu", action="store_true", help="leave GPUs alone")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args(arguments)


def main():
    options = parse()
    trainer, _ = make_trainer(options)
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(options.out) if options.resume else None
    )
    trainer.save_model()


if __name__ == "__main__":
    main()
