"""Weights that a fine-tuning begins with."""

import pytest
import torch
from helpers.finetuning import FINETUNED_MODEL, glue, squad
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertModel, RobertaConfig, RobertaModel

from onebit.lab.tasks.weights import HubWeights, PackagedWeights
from onebit.lab.training.loop import decayed_and_not

pytestmark = pytest.mark.usefixtures("own_hub")


def saved(folder, **changed):
    torch.manual_seed(1)
    encoder = BertModel(BertConfig(**FINETUNED_MODEL | changed))
    encoder.save_pretrained(folder)
    return encoder


@pytest.mark.parametrize("make", [glue, squad])
def test_the_encoder_begins_with_the_pretrained_weights_and_the_head_with_the_seeds(tmp_path, make):
    theirs = saved(tmp_path / "bert").state_dict()
    task = make(tmp_path, weights=HubWeights(name=str(tmp_path / "bert")))
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(task.model())
        ours = models[-1].bert.state_dict()
        assert len(ours) > 20 and all(
            torch.equal(theirs[name], tensor) for name, tensor in ours.items()
        )
    heads = [list(model.parameters())[-2] for model in models]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert "weights of bert;" in task.description()["summary"]


def test_embeddings_that_are_kept_have_no_gradient_and_no_optimizer(tmp_path):
    task = glue(tmp_path, train_embeddings=False)
    model = task.model()
    task.loss(model, task.batch(0, 0, 0, 4, 32)).backward()
    trained = {name for group in decayed_and_not(model) for name, _ in group["params"]}
    assert trained == {
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    kept = {name for name, _ in model.named_parameters()} - trained
    assert kept and all(name.startswith("bert.embeddings.") for name in kept)
    assert not any("embeddings" in name for name in trained)


def test_weights_that_are_not_there_or_of_another_network_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match="hf download google-bert/bert-base-uncased"):
        glue(tmp_path, weights=HubWeights(name="google-bert/bert-base-uncased")).prepare()
    missing = PackagedWeights(
        package="no_such_bert", folder="model", requirement="no-such-bert==1.0", title="none"
    )
    with pytest.raises(RuntimeError, match="pip install --no-deps no-such-bert==1.0"):
        glue(tmp_path, weights=missing).prepare()
    saved(tmp_path / "bert", num_hidden_layers=2)
    with pytest.raises(ValueError, match="set task.model.num_hidden_layers=2"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "bert"))).model()


def test_a_network_is_not_filled_up_with_random_weights(tmp_path):
    """transformers gives what a file lacks random values.

    Only the pooler, which a model of masked words does not have, may begin so.
    """
    theirs = saved(tmp_path / "bert").state_dict()
    lacks = {name: tensor for name, tensor in theirs.items() if "query.weight" not in name}
    save_file(lacks, tmp_path / "bert/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks encoder.layer.0.attention.self.query.weight"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "bert"))).model()
    BertForMaskedLM(BertConfig(**FINETUNED_MODEL)).save_pretrained(tmp_path / "words")
    glue(tmp_path, weights=HubWeights(name=str(tmp_path / "words"))).model()


def test_weights_of_another_kind_of_model_or_without_their_file_are_refused_before_training(
    tmp_path,
):
    """RoBERTa has BERT's sizes and names, but begins to count positions elsewhere."""
    RobertaModel(RobertaConfig(**FINETUNED_MODEL)).save_pretrained(tmp_path / "roberta")
    with pytest.raises(ValueError, match="a roberta, not a bert"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "roberta"))).prepare()
    saved(tmp_path / "bert", num_hidden_layers=2)
    with pytest.raises(ValueError, match="set task.model.num_hidden_layers=2"):
        glue(tmp_path, weights=HubWeights(name=str(tmp_path / "bert"))).prepare()
    (tmp_path / "bert/model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="hf download"):
        glue(
            tmp_path,
            weights=HubWeights(name=str(tmp_path / "bert")),
            model=FINETUNED_MODEL | {"num_hidden_layers": 2},
        ).prepare()


def test_weights_are_found_in_an_installed_package_and_not_looked_for_on_the_meta_device(
    tmp_path, monkeypatch
):
    weights = PackagedWeights(
        package="a_bert_of_the_test", folder="model", requirement="a-bert==1.0", title="a BERT"
    )
    with torch.device("meta"):
        glue(tmp_path, weights=weights).model()
    (tmp_path / "site/a_bert_of_the_test").mkdir(parents=True)
    (tmp_path / "site/a_bert_of_the_test/__init__.py").write_text("raise ImportError")
    theirs = saved(tmp_path / "site/a_bert_of_the_test/model").state_dict()
    monkeypatch.syspath_prepend(tmp_path / "site")
    ours = glue(tmp_path, weights=weights).model().bert.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
