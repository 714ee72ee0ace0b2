"""Tokenized text on disk: documents, cut into segments (sentences).

A text is tokenized once; all processes read the same files.
"""

import hashlib
import json
import re
import shutil
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from onebit.lab.tasks.tokenizer import END, SEP, SPECIAL

FORMAT = 2  # a part of the cache's key: increase it when the stored format changes
DOCUMENTS_AT_ONCE = 256


class Corpus(NamedTuple):
    """The tokens of all documents, end to end.

    tokens: uint16 or uint32 [n].
    segments: int64 [s + 1], where each segment starts in `tokens`, and n at the end.
    document_ends: int64 [s], for each segment the number of the first segment of the next document.
    special: the numbers of the pieces [PAD], [UNK], [CLS], [SEP] and [MASK].
    vocab_size: the number of the tokenizer's pieces.
    sha256: the checksum of the tokens.
    """

    tokens: np.ndarray
    segments: np.ndarray
    document_ends: np.ndarray
    special: dict[str, int]
    vocab_size: int
    sha256: str


def split_segments(document: str) -> list[str]:
    """The sentences of a document.

    A paragraph ends at a blank line, and a sentence at . ! or ? before a space.
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", document))
    return [
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?]) ", paragraph)
        if sentence
    ]


def load_corpus(
    text: Any, tokenizer: Any, cache: Path, whole: bool = False, learned_from: Any = None
) -> Corpus:
    """The corpus of a text, from `cache`, or built there by one process while the others wait.

    Args:
        text, tokenizer: members of `tasks.text` and `tasks.tokenizer`.
        whole: if True, a document is one segment, exactly as it is written, and is followed by a
            token that marks its end: GPT-2's, or [SEP].
        learned_from: the text that the tokenizer is trained on, if it is trained; None: `text`.

    Raises:
        RuntimeError: the text has no documents, or none that sentence pairs can be drawn from.
    """
    parts = [
        FORMAT,
        text.fingerprint(),
        tokenizer.fingerprint(),
        *["whole"] * whole,
        *([learned_from.fingerprint()] if learned_from else []),
    ]
    key = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]
    folder = cache / f"corpus-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _build(text, tokenizer.build((learned_from or text).documents()), folder, whole)
    about = json.loads((folder / "about.json").read_text())
    dtype = about.pop("dtype")
    return Corpus(
        tokens=np.memmap(folder / "tokens", dtype, "r"),
        segments=np.memmap(folder / "segments", np.int64, "r"),
        document_ends=np.memmap(folder / "document_ends", np.int64, "r"),
        **about,
    )


def _build(text: Any, tokenizer: Tokenizer, folder: Path, whole: bool) -> None:
    vocab_size = tokenizer.get_vocab_size()
    dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
    partial = folder.with_suffix(".partial")  # may be there if a process was killed
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    starts, ends, digest = array("q", [0]), array("q"), hashlib.sha256()
    with open(partial / "tokens", "wb") as file:
        for document in _tokenized(text.documents(), tokenizer, whole):
            for ids in document:
                data = np.array(ids, dtype).tobytes()
                file.write(data)
                digest.update(data)
                starts.append(starts[-1] + len(ids))
            ends.extend([len(ends) + len(document)] * len(document))
    if not ends:
        raise RuntimeError(
            "The text, or the part of it that is held out, has no documents: give a longer text, "
            "or hold out more (task.held_out)."
        )
    if not whole and (len(set(ends)) < 2 or len(set(ends)) == len(ends)):
        raise RuntimeError(
            "The text has no two documents with sentences that follow each other, so that there "
            "are no sentence pairs to learn from: give a text with longer documents (if its rows "
            "are single sentences, increase `rows`)."
        )
    (partial / "segments").write_bytes(starts.tobytes())
    (partial / "document_ends").write_bytes(ends.tobytes())
    special = {piece: tokenizer.token_to_id(piece) for piece in SPECIAL}
    about = {
        "dtype": str(dtype),
        "special": special,
        "vocab_size": vocab_size,
        "sha256": digest.hexdigest(),
    }
    (partial / "about.json").write_text(json.dumps(about))
    partial.rename(folder)


def _tokenized(
    documents: Iterable[str], tokenizer: Tokenizer, whole: bool
) -> Iterator[list[list[int]]]:
    """For each document that has words: a list of its segments' tokens."""
    documents = iter(documents)
    ends = (
        [end for end in map(tokenizer.token_to_id, (END, SEP)) if end is not None][:1]
        if whole
        else []
    )
    while some := list(islice(documents, DOCUMENTS_AT_ONCE)):
        cut = [[document] if whole else split_segments(document) for document in some]
        encoded = iter(
            tokenizer.encode_batch(
                [s for segments in cut for s in segments], add_special_tokens=False
            )
        )
        for segments in cut:
            document = [
                encoding.ids + ends for encoding in islice(encoded, len(segments)) if encoding.ids
            ]
            if document:
                yield document
