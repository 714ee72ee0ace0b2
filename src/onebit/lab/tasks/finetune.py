"""What fine-tuning tasks have in common: a pretrained BERT with a new head, and epochs."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig

from onebit.lab.tasks import Task, epochs
from onebit.lab.tasks.examples import Examples
from onebit.lab.tasks.model import configured, require_pieces


class FineTuning(Task):
    """A BERT with a new head for one task. The head's weights are random, and the loss is its own.

    An epoch has each training example once (see `epochs.samples`); the workers take disjoint parts
    of a step's batch.

    model: keywords of transformers' BertConfig.
    weights: a member of `tasks.weights`; None: random weights.
    tokenizer: a member of `tasks.tokenizer`, with the pieces of the weights.
    train_embeddings: if False, the embeddings keep their pretrained values, and have no gradient,
        no traffic and no state in the optimizer.
    batch: the examples of a step, of all workers together.
    length: the largest number of tokens of an example, which is that of the phase.
    cache: the folder for the tokenized examples; it may be deleted at any time.
    """

    evaluates = True
    network: type[nn.Module]  # a class of transformers

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
        """The keywords of BertConfig that the task's head needs."""
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
        # They are built before the workers are forked, since the tokenizer uses threads.
        _ = self.train, self.test

    def description(self) -> dict:
        weights = {} if self.weights is None else self.weights.description()
        return {
            "summary": f"{self.bert_summary}; {self.data_summary}",
            "data": self.data_description(),
            **weights,
        }

    @property
    def bert_summary(self) -> str:
        """What a caption says of the model."""
        layers, width = self.model_config["num_hidden_layers"], self.model_config["hidden_size"]
        weights = "random weights" if self.weights is None else f"weights of {self.weights.title}"
        kept = "" if self.train_embeddings else ", embeddings kept"
        return f"BERT of {layers} layers, {width} wide, {weights}{kept}"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which neither cuts nor pads."""
        tokenizer = self.wordpiece.build(self.documents())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def batch(self, seed: int, step: int, rank: int, size: int, length: int) -> dict[str, Tensor]:
        start = step * self.step_batch + rank * size
        chosen = epochs.samples(seed, start, size, len(self.train))
        return self.train.inputs(chosen) | self.labels(self.train.labels[chosen])

    @property
    def train(self) -> Examples:
        """The training examples."""
        raise NotImplementedError

    def labels(self, labels: np.ndarray) -> dict[str, Tensor]:
        """The labels as arguments of the network, which then returns its loss."""
        raise NotImplementedError

    def documents(self) -> Iterable[str]:
        """The texts that a tokenizer may be trained on."""
        raise NotImplementedError


def in_parts(count: int, size: int = 32) -> list[range]:
    """The numbers from 0 to `count` in ranges of at most `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def on_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch on that device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
