"""WordPiece, as BERT uses it: trained on the text, or loaded."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END = "<|endoftext|>"  # GPT-2's


# Added to the code of a character that does not begin its word: Unicode's last plane, which is private.
CONTINUED = 0x100000


class TrainedWordPiece:
    """A lower-case WordPiece of `vocab_size` pieces, trained on the text itself: a function of the text alone.

    The library's own WordPiece trainer breaks ties by the order of a hash table, so that two runs get different pieces. Its
    BPE trainer, which it is built on, does not, if "##b" is a character like any other.
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
    """The words of a document, divided by spaces, with CONTINUED added to all characters but the first of each."""
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
    """A tokenizer that exists: a file `tokenizer.json` or `vocab.txt`, or the hub's name of a model, "bert-base-uncased".

    Raises RuntimeError, with the command that fetches it, if it is not there.
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
                f"The tokenizer {self.name} is not here and could not be fetched ({error}).\nFetch it on a machine with a "
                f"network: hf download {self.name} tokenizer.json\nor give the path of a tokenizer.json or vocab.txt: "
                "task.tokenizer.name=PATH."
            ) from error


def _wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([piece for piece in SPECIAL if piece in vocabulary])
    return tokenizer
