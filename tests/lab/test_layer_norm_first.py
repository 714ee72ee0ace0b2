"""BERT with its LayerNorms before the sublayers, as the 1-bit LAMB paper has it."""

import torch
from transformers import BertConfig, BertForPreTraining

from onebit.lab.config import composed
from onebit.lab.tasks.bert import normalise_first

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def made():
    torch.manual_seed(1)
    model = BertForPreTraining(BertConfig(**SMALL)).eval()
    for name, p in model.named_parameters():  # so that norms differ from each other
        if "LayerNorm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


def by_hand(layers, x):
    """x + attention(LN x), then x + feed-forward(LN x); the encoder's LayerNorm at the end."""
    for layer in layers:
        attention = layer.attention
        inner = attention.self(x)[0]
        x = x + attention.output.dense(inner)
        x = x + layer.output.dense(layer.intermediate(x))
    return layers[-1].output.LayerNorm(x)


def test_each_sublayer_sees_the_norm_of_its_input_and_adds_to_the_input_itself():
    model = made()
    normalise_first(model)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        x = model.bert.embeddings(tokens)
        expected = by_hand(model.bert.encoder.layer, x)
        found = model.bert(tokens).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_model_has_as_many_parameters_as_before_and_one_norm_more():
    before, after = made(), made()
    normalise_first(after)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (before, after)]
    assert sizes[1] == sizes[0] + 2 * SMALL["hidden_size"]


def test_the_large_batches_of_the_papers_profile_have_it_and_no_other():
    assert composed(["experiment=lamb", "profile=paper"]).task.model.layer_norm_first
    assert "layer_norm_first" not in composed(["experiment=figure_04", "profile=paper"]).task.model
