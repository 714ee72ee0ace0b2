"""A small GPT-2 on a small text."""

from helpers.lab_text import FewDocuments
from onebit.lab.tasks.gpt2 import Gpt2Pretraining
from onebit.lab.tasks.tokenizer import TrainedWordPiece

GPT2_MODEL = {
    "vocab_size": 80,
    "n_positions": 12,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def make_task(cache, text=None, held_out=5, tokenizer=None, **more):
    options = {
        "model": GPT2_MODEL,
        "tokenizer": tokenizer or TrainedWordPiece(vocab_size=80),
    } | more
    return Gpt2Pretraining(text=text or FewDocuments(), held_out=held_out, cache=cache, **options)
