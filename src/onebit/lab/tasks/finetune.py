"""What fine-tuning tasks share: a pretrained BERT under a new head, and batches in epochs."""

from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig

from onebit.lab.tasks import Task
from onebit.lab.tasks.examples import Examples
from onebit.lab.tasks.images import chosen_images
from onebit.lab.tasks.model import configured, require_pieces


class FineTuning(Task):
    """A BERT with a head for one task, which begins at transformers' random values; the loss is the head's own.

    An epoch is a permutation of the training examples, a function of (seed, epoch); the workers take disjoint parts of a step's batch.

    model: keywords of transformers' BertConfig.
    weights: a member of `tasks.weights`; None: random ones.
    tokenizer: a member of `tasks.tokenizer`, of the same pieces as the weights.
    train_embeddings: False keeps the embeddings at the pretrained values: no gradient, no traffic, no optimizer's state for them.
    batch: samples of a step, of all workers.
    length: tokens of an example, at most; that of the phase.
    cache: the folder for the tokenized examples; it may be deleted at any time.
    """

    evaluates = True
    network: type[nn.Module]  # of transformers

    def __init__(
        self,
        *,
        model: dict,
        weights,
        tokenizer,
        batch: int,
        length: int,
        cache: str,
        train_embeddings: bool = True,
    ):
        self.model_config = dict(model)
        self.weights = weights
        self.wordpiece = tokenizer
        self.train_embeddings = train_embeddings
        self.step_batch = batch
        self.length = length
        self.cache = Path(cache).expanduser()

    def head(self) -> dict:
        """Keywords of BertConfig that the task's head needs."""
        return {}

    def model(self) -> nn.Module:
        model = self.network(configured(BertConfig, self.model_config | self.head()))
        if self.weights is not None and not next(model.parameters()).is_meta:
            self.weights.load_into(model.bert)
        model.bert.embeddings.requires_grad_(self.train_embeddings)
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    def prepare(self) -> None:
        if self.weights is not None:
            self.weights.require(self.model_config)
        require_pieces(self.model_config, self.tokenizer.get_vocab_size())
        _ = (
            self.train,
            self.test,
        )  # before the workers are forked, since the tokenizer works in threads

    def description(self) -> dict:
        weights = {} if self.weights is None else self.weights.description()
        return {
            "summary": f"{self.bert_summary}; {self.data_summary}",
            "data": self.data_description(),
            **weights,
        }

    @property
    def bert_summary(self) -> str:
        layers, width = self.model_config["num_hidden_layers"], self.model_config["hidden_size"]
        weights = "random weights" if self.weights is None else f"weights of {self.weights.title}"
        return f"BERT of {layers} layers, {width} wide, {weights}{'' if self.train_embeddings else ', embeddings kept'}"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.wordpiece.build(self.documents())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        chosen = chosen_images(seed, step * self.step_batch + rank * size, size, len(self.train))
        return self.train.inputs(chosen) | self.labels(self.train.labels[chosen])

    @property
    def train(self) -> Examples:
        raise NotImplementedError

    def labels(self, labels) -> dict[str, Tensor]:
        """What the network's loss takes."""
        raise NotImplementedError

    def documents(self):
        """The texts that a tokenizer may be trained on."""
        raise NotImplementedError


def in_parts(count: int, size: int = 32) -> list[range]:
    """0 .. count in ranges of at most `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
