"""A small text for the tests of the lab, chosen by `_target_`."""

import random

from onebit.lab.tasks.corpus import load_corpus
from onebit.lab.tasks.tokenizer import TrainedWordPiece

_random = random.Random(0)
_WORDS = (
    "the a gradient momentum variance worker server error sign scale step of in and is sends "
    "keeps adds"
).split()


def _sentence():
    return " ".join(_random.choices(_WORDS, k=_random.randint(2, 12))) + "."


DOCUMENTS = [
    "\n\n".join(" ".join(_sentence() for _ in range(_random.randint(1, 3))) for _ in range(5))
    for _ in range(20)
]
TEXT = "\n\n".join(DOCUMENTS)


class FewDocuments:
    def fingerprint(self):
        return "few documents"

    def documents(self):
        yield from DOCUMENTS


def build_corpus(cache):
    return load_corpus(FewDocuments(), TrainedWordPiece(vocab_size=80), cache).sha256
