"""GPT-2 pre-training: the next token, in transformers' own model."""

from collections.abc import Iterator
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from onebit.lab.tasks import Task
from onebit.lab.tasks.corpus import Corpus, load_corpus
from onebit.lab.tasks.model import configured, require_pieces
from onebit.lab.tasks.text import EveryNth

BLOCKS_AT_ONCE = 32  # so many are evaluated together


class Gpt2Pretraining(Task):
    """GPT-2 pre-training (Radford et al. 2019): guess each token from those before it.

    All documents stand end to end. An example is a block of tokens that begins anywhere in them,
    drawn with replacement, so that it may hold the end of one document and the start of the next.
    The loss is the mean cross-entropy of all tokens of a block but the first, in nats.

    The metrics are `validation_loss` and `perplexity`. The first is the same loss over the held-out
    documents, which are cut into blocks of as many tokens as the model sees at once; the last,
    shorter block is left out. The perplexity of a token is the exponential of that loss, and
    depends on the tokenizer.

    model: keywords of transformers' GPT2Config.
    text, tokenizer: members of `tasks.text` and `tasks.tokenizer`.
    held_out: hold out every document whose number this divides.
    validation_blocks: evaluate only so many first blocks; None: all.
    cache: the folder for the tokenized text; it may be deleted at any time.
    """

    evaluates = True

    def __init__(
        self,
        *,
        model: dict,
        text: Any,
        tokenizer: Any,
        held_out: int,
        cache: str,
        validation_blocks: int | None = None,
    ):
        if held_out < 2:
            raise ValueError(
                f"task.held_out must be at least 2, not {held_out}: it holds out every document "
                "whose number it divides."
            )
        self.model_config = dict(model)
        self.tokenizer = tokenizer
        self.texts = {
            name: EveryNth(text, held_out, held_out=name == "validation")
            for name in ("train", "validation")
        }
        self.validation_blocks = validation_blocks
        self.cache = Path(cache).expanduser()

    def model(self) -> torch.nn.Module:
        # The model does not generate text, and does not need to know where a document ends.
        unused = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
        return GPT2LMHeadModel(configured(GPT2Config, self.model_config | unused))

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["input_ids"]
        return functional.cross_entropy(
            model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    def prepare(self) -> None:
        for corpus in (self.train, self.validation):
            if len(corpus.tokens) < self.length:
                raise RuntimeError(
                    f"The text gives {len(corpus.tokens)} tokens to train on or to evaluate, and a "
                    f"block has {self.length}: give a longer text, or set task.held_out so that "
                    "both parts have documents."
                )

    @property
    def length(self) -> int:
        """The number of tokens that the model sees at once."""
        return self.model_config["n_positions"]

    def description(self) -> dict:
        model, count = self.model_config, len(self.blocks)
        return {
            "corpus_tokens": len(self.train.tokens),
            "corpus_sha256": self.train.sha256,
            "data": {
                "validation": {
                    "tokens": len(self.validation.tokens),
                    "sha256": self.validation.sha256,
                }
            },
            "summary": f"GPT-2 of {model['n_layer']} layers, {model['n_embd']} wide, "
            f"{self.length} tokens",
            "evaluated": f"Validation: the mean of the workers' models on {count:,} held-out "
            f"blocks of {self.length} tokens; each evaluation is a point.",
        }

    @cached_property
    def train(self) -> Corpus:
        """The documents that are trained on."""
        return self._load("train")

    @cached_property
    def validation(self) -> Corpus:
        """The documents that are held out."""
        return self._load("validation")

    def _load(self, name: str) -> Corpus:
        corpus = load_corpus(
            self.texts[name],
            self.tokenizer,
            self.cache,
            whole=True,
            learned_from=self.texts["train"],
        )
        require_pieces(self.model_config, corpus.vocab_size)
        return corpus

    def batch(
        self, seed: int, step: int, rank: int, size: int, length: int
    ) -> dict[str, torch.Tensor]:
        """`size` blocks of `length` tokens: this worker's part of a step's batch."""
        if length > self.length:
            raise ValueError(
                f"A phase has blocks of {length} tokens, and the model sees {self.length}: set "
                f"task.model.n_positions={length}."
            )
        starts = np.random.default_rng([seed, step, rank]).integers(
            len(self.train.tokens) - length + 1, size=size
        )
        blocks = self.train.tokens[starts[:, None] + np.arange(length)]
        return {"input_ids": torch.from_numpy(blocks.astype(np.int64))}

    @property
    def blocks(self) -> np.ndarray:
        """The held-out text, [blocks, length]."""
        tokens = self.validation.tokens
        return tokens[: len(tokens) // self.length * self.length].reshape(-1, self.length)[
            : self.validation_blocks
        ]

    def _validation_batches(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.blocks), BLOCKS_AT_ONCE):
            yield torch.from_numpy(self.blocks[start : start + BLOCKS_AT_ONCE].astype(np.int64))

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, device: torch.device) -> dict[str, float]:
        model.eval()
        total = 0.0
        for blocks in self._validation_batches():
            total += float(self.loss(model, {"input_ids": blocks.to(device)})) * len(blocks)
        loss = total / len(self.blocks)
        # The perplexity of a model that has diverged may be larger than a float can hold.
        return {"validation_loss": loss, "perplexity": exp(min(loss, 700.0))}
