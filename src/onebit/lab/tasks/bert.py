"""BERT pre-training: masked words and next sentence, in transformers' own model."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForPreTraining

from onebit.lab.tasks import Task
from onebit.lab.tasks.corpus import Corpus, load_corpus
from onebit.lab.tasks.model import configured, require_pieces
from onebit.lab.tasks.tokenizer import CLS, MASK, PAD, SEP

MASKED = 0.15  # the share of the words that are to be guessed
KEPT, RANDOM = 0.1, 0.1  # shares of these words; the other 80 % are replaced by [MASK]
IGNORED = -100  # the label that the loss ignores


class LayerNormFirst(torch.nn.Module):
    """A sublayer of the input's LayerNorm: x -> sublayer(LayerNorm(x))."""

    def __init__(self, norm: torch.nn.LayerNorm, sublayer: torch.nn.Module):
        super().__init__()
        self.norm = norm
        self.sublayer = sublayer

    def forward(self, x: torch.Tensor, *args, **kwargs) -> object:
        return self.sublayer(self.norm(x), *args, **kwargs)


def normalise_first(model: BertForPreTraining) -> None:
    """Move each LayerNorm of the layers from behind its sum to before its sublayer ("PreLN").

    x + f(LayerNorm(x)) takes the place of LayerNorm(x + f(x)). The last layer keeps a LayerNorm
    behind it, which is that of the whole encoder.
    """
    layers = model.bert.encoder.layer
    for layer in layers:
        attention, last = layer.attention, layer is layers[-1]
        own = torch.nn.LayerNorm(model.config.hidden_size, eps=model.config.layer_norm_eps)
        attention.self = LayerNormFirst(attention.output.LayerNorm, attention.self)
        attention.output.LayerNorm = torch.nn.Identity()
        layer.intermediate = LayerNormFirst(
            own if last else layer.output.LayerNorm, layer.intermediate
        )
        if not last:
            layer.output.LayerNorm = torch.nn.Identity()


class BertPretraining(Task):
    """BERT pre-training (Devlin et al. 2019): masked words and next sentence.

    An example is [CLS] A [SEP] B [SEP]. Half of the time B follows A in its document; otherwise it
    comes from another document. 15 % of the words are to be guessed: 80 % of these are masked, 10 %
    are replaced by a random piece, and 10 % stay as they are. The loss is the sum of the two mean
    cross-entropies, in nats.

    Examples are drawn during training, with replacement. The original writes ten copies of the data
    to disk instead.

    model: keywords of transformers' BertConfig, and `layer_norm_first`, see `LayerNormFirst`.
    text, tokenizer: members of `tasks.text` and `tasks.tokenizer`.
    cache: the folder for the tokenized text; it may be deleted at any time.
    """

    def __init__(self, *, model: dict, text, tokenizer, cache: str):
        self.model_config = dict(model)
        self.layer_norm_first = self.model_config.pop("layer_norm_first", False)
        self.text = text
        self.tokenizer = tokenizer
        self.cache = Path(cache).expanduser()

    def model(self) -> torch.nn.Module:
        model = BertForPreTraining(configured(BertConfig, self.model_config))
        if self.layer_norm_first:
            normalise_first(model)
        return model

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss

    def prepare(self) -> None:
        # Each worker opens the cached corpus by itself later.
        load_corpus(self.text, self.tokenizer, self.cache)

    def description(self) -> dict:
        return {"corpus_tokens": len(self.corpus.tokens), "corpus_sha256": self.corpus.sha256}

    @cached_property
    def corpus(self) -> Corpus:
        corpus = load_corpus(self.text, self.tokenizer, self.cache)
        require_pieces(self.model_config, corpus.vocab_size)
        return corpus

    def batch(
        self, seed: int, step: int, rank: int, size: int, length: int
    ) -> dict[str, torch.Tensor]:
        """`size` examples of `length` tokens: this worker's part of a step's batch."""
        random = np.random.default_rng([seed, step, rank])
        special = self.corpus.special
        inputs = np.full((size, length), special[PAD], np.int64)
        is_b = np.zeros((size, length), np.int64)
        words = np.zeros((size, length), bool)
        is_random = random.random(size) < 0.5
        for i in range(size):
            a, b = self._pair(random, is_random[i], room=length - 3)
            row = np.concatenate([[special[CLS]], a, [special[SEP]], b, [special[SEP]]])
            inputs[i, : len(row)] = row
            is_b[i, len(a) + 2 : len(row)] = 1
            words[i, 1 : len(a) + 1] = words[i, len(a) + 2 : len(row) - 1] = True
        attended = inputs != special[PAD]
        inputs, labels = self._masked(random, inputs, words)
        return {
            "input_ids": torch.from_numpy(inputs),
            "token_type_ids": torch.from_numpy(is_b),
            "attention_mask": torch.from_numpy(attended.astype(np.int64)),
            "labels": torch.from_numpy(labels),
            "next_sentence_label": torch.from_numpy(is_random.astype(np.int64)),
        }

    def _pair(self, random, is_random: bool, room: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of A and B, together at most `room`."""
        tokens, segments, document_ends = self.corpus[:3]
        first = random.integers(len(document_ends))
        while first + 1 == document_ends[first]:  # nothing follows it
            first = random.integers(len(document_ends))
        # A has as many segments as fill half of the room, but leaves one of its document to B.
        after_a = np.searchsorted(segments, segments[first] + room // 2)
        after_a = min(max(after_a, first + 1), document_ends[first] - 1)
        start_b = after_a
        while is_random and document_ends[start_b] == document_ends[first]:
            start_b = random.integers(len(document_ends))
        a = tokens[segments[first] : segments[after_a]]
        b = tokens[
            segments[start_b] : min(segments[document_ends[start_b]], segments[start_b] + room)
        ]
        # The longer of the two is cut until both fit. A is cut at a random place, so that the cut
        # does not tell where B comes from.
        length_a = min(len(a), max(room - len(b), (room + 1) // 2))
        cut = random.integers(len(a) - length_a + 1)
        return a[cut : cut + length_a], b[: room - length_a]

    def _masked(
        self, random, inputs: np.ndarray, words: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The inputs with some words replaced, and the labels.

        A label is the original word where it is to be guessed, and IGNORED elsewhere.
        """
        count = np.maximum(1, np.round(MASKED * words.sum(1))).astype(np.int64)
        order = np.argsort(np.where(words, random.random(words.shape), 2.0), axis=1)
        rank_of = np.argsort(order, axis=1)
        chosen = rank_of < count[:, None]
        fate = random.random(words.shape)
        replaced = np.where(fate < 1 - KEPT - RANDOM, self.corpus.special[MASK], inputs)
        pieces = random.integers(len(self.corpus.special), self.corpus.vocab_size, words.shape)
        replaced = np.where(fate >= 1 - RANDOM, pieces, replaced)
        return np.where(chosen, replaced, inputs), np.where(chosen, inputs, IGNORED)
