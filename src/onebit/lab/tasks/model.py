"""Checks of a model's configuration, for any model of transformers."""

from transformers import PretrainedConfig


def configured(kind: type[PretrainedConfig], keywords: dict) -> PretrainedConfig:
    """kind(**keywords).

    Raises:
        ValueError: a keyword is unknown. transformers would keep it silently.
    """
    # transformers stores num_labels under another name.
    unknown = set(keywords) - set(kind().to_dict()) - {"num_labels"}
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no {', '.join(sorted(unknown))}: see "
            f"transformers.{kind.__name__} for its keywords."
        )
    return kind(**keywords)


def require_pieces(keywords: dict, pieces: int) -> None:
    """Raise ValueError if the tokenizer has more pieces than the model."""
    if pieces > keywords["vocab_size"]:
        raise ValueError(
            f"The tokenizer has {pieces} pieces and the model {keywords['vocab_size']}: set "
            f"task.model.vocab_size={pieces}."
        )
