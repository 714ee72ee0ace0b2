"""What the tasks ask of a model's configuration, whichever model of transformers it is."""

from transformers import PretrainedConfig


def configured(kind: type[PretrainedConfig], keywords: dict) -> PretrainedConfig:
    """kind(**keywords); ValueError for a keyword that it does not know, and would keep without a word."""
    unknown = (
        set(keywords) - set(kind().to_dict()) - {"num_labels"}
    )  # which transformers stores under another name
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no {', '.join(sorted(unknown))}: see transformers.{kind.__name__} for its keywords."
        )
    return kind(**keywords)


def require_pieces(keywords: dict, pieces: int) -> None:
    """ValueError if the tokenizer has pieces that the model does not know."""
    if pieces > keywords["vocab_size"]:
        raise ValueError(
            f"The tokenizer has {pieces} pieces and the model {keywords['vocab_size']}: set task.model.vocab_size={pieces}."
        )
