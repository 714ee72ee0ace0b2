"""Tokenizers: WordPiece, as BERT uses it, trained on the text or loaded."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END = "<|endoftext|>"  # GPT-2's mark of a document's end

# Added to the code of a character that does not begin its word. It leads into the last plane of
# Unicode, which is for private use.
CONTINUED = 0x100000


class TrainedWordPiece:
    """A lower-case WordPiece of `vocab_size` pieces, trained on the text, and a function of it.

    The WordPiece trainer of the library breaks ties by the order of a hash table, so that two runs
    get different pieces. The BPE trainer, on which it is built, does not. It is used here, with
    characters of their own for those that WordPiece writes as "##b".
    """

    def __init__(self, *, vocab_size: int):
        self.vocab_size = vocab_size

    def fingerprint(self) -> str:
        return f"trained {self.vocab_size}"

    def build(self, documents: Iterable[str]) -> Tokenizer:
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - len(SPECIAL), show_progress=False
        )
        trained.train_from_iterator(map(_marked, documents), trainer)
        pieces = [*SPECIAL, *sorted(map(_unmarked, trained.get_vocab()))]
        return _wordpiece({piece: number for number, piece in enumerate(pieces)})


def _marked(document: str) -> str:
    """The words of a document, with CONTINUED added to all but the first character of each."""
    tokenizer = _wordpiece({})
    words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(document))
    marked = (
        word[0] + "".join(chr(ord(c) + CONTINUED) for c in word[1:])
        for word, _ in words
        if max(word) <= "\uffff"
    )
    return " ".join(marked)


def _unmarked(piece: str) -> str:
    start = "##" if ord(piece[0]) >= CONTINUED else ""
    return start + "".join(chr(ord(c) % CONTINUED) for c in piece)


class LoadedWordPiece:
    """A tokenizer from a file `tokenizer.json` or `vocab.txt`, or of a model on the hub.

    name: the path, or the model's id, such as "google-bert/bert-base-uncased".

    Raises:
        RuntimeError: it is not there; the message has the command that fetches it.
    """

    def __init__(self, *, name: str):
        self.name = name

    def fingerprint(self) -> str:
        return f"loaded {self.name}"

    def build(self, documents: Iterable[str]) -> Tokenizer:
        path = Path(self.name).expanduser()
        if path.suffix == ".txt" and path.exists():
            return _wordpiece(
                {piece: number for number, piece in enumerate(path.read_text("utf-8").splitlines())}
            )
        try:
            return (
                Tokenizer.from_file(str(path))
                if path.exists()
                else Tokenizer.from_pretrained(self.name)
            )
        except Exception as error:  # the library raises bare Exceptions
            raise RuntimeError(
                f"The tokenizer {self.name} is not here and could not be fetched ({error}).\n"
                "Fetch it on a machine with a network:\n"
                f"    hf download {self.name} tokenizer.json\n"
                "or give the path of a tokenizer.json or vocab.txt: task.tokenizer.name=PATH."
            ) from error


def _wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([piece for piece in SPECIAL if piece in vocabulary])
    return tokenizer
