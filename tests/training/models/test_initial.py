import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
)

from hf_dist.config import ModelConfig
from hf_dist.errors import ConfigError
from hf_dist.training.models.initial import initial_model_folder, load_model, set_dropout


@pytest.fixture
def tiny():
    return BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_same_seed_same_weights_other_seed_others(tiny):
    auto = AutoModelForSequenceClassification
    torch.manual_seed(1)
    first = weights(load_model(tiny, auto, ModelConfig(), seed=7).model)
    torch.manual_seed(2)
    second = weights(load_model(tiny, auto, ModelConfig(), seed=7).model)
    assert torch.equal(first, second)
    assert not torch.equal(first, weights(load_model(tiny, auto, ModelConfig(), seed=8).model))


def test_weights_are_those_of_from_config(tiny):
    auto = AutoModelForSequenceClassification
    torch.manual_seed(7)
    expected = weights(auto.from_config(tiny))
    assert torch.equal(weights(load_model(tiny, auto, ModelConfig(), seed=7).model), expected)


def test_the_callers_random_state_is_left_alone(tiny):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    initial_model_folder(tiny, AutoModelForSequenceClassification, seed=123456)
    assert torch.equal(torch.rand(2), expected)


def test_dropout_reaches_every_probability_of_the_config():
    bert = BertConfig()
    assert set(set_dropout(bert, 0.0)) >= {"hidden_dropout_prob", "attention_probs_dropout_prob"}
    assert bert.classifier_dropout == 0.0
    gpt = GPT2Config()
    set_dropout(gpt, 0.25)
    assert (gpt.resid_pdrop, gpt.embd_pdrop, gpt.attn_pdrop) == (0.25, 0.25, 0.25)


def test_dropout_without_a_field_is_an_error():
    with pytest.raises(ConfigError, match="no dropout probability"):
        set_dropout(PretrainedConfig(), 0.1)


def test_a_model_that_is_not_there_is_one_clear_error(tiny, tmp_path):
    model = ModelConfig(model_name_or_path=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="--model_name_or_path .*nothing can't be loaded"):
        load_model(tiny, AutoModelForSequenceClassification, model, seed=1)


@pytest.fixture
def encoder(tiny, tmp_path):
    BertForMaskedLM(tiny).save_pretrained(tmp_path / "encoder")
    return ModelConfig(model_name_or_path=str(tmp_path / "encoder"))


@pytest.fixture
def classifier(tiny, tmp_path):
    BertForSequenceClassification(tiny).save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def with_classes(config, count):
    return BertConfig(**{**config.to_dict(), "num_labels": count})


def test_what_a_named_model_lacks_depends_on_the_seed_alone(tiny, encoder):
    auto = AutoModelForSequenceClassification
    found = []
    for noise, seed in ((1, 7), (2, 7), (2, 8)):
        torch.manual_seed(noise)
        loaded = load_model(tiny, auto, encoder, seed=seed)
        # An encoder that learned by masked words has neither a pooler nor a head.
        assert set(loaded.drawn) == {
            f"{module}.{kind}"
            for module in ("bert.pooler.dense", "classifier")
            for kind in ("weight", "bias")
        }
        found.append(weights(loaded.model))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_drawing_leaves_the_callers_random_state_alone(tiny, encoder):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_model(tiny, AutoModelForSequenceClassification, encoder, seed=123456)
    assert torch.equal(torch.rand(2), expected)


def test_what_is_drawn_is_said_in_one_line(tiny, encoder, caplog):
    with caplog.at_level("INFO"):
        load_model(tiny, AutoModelForTokenClassification, encoder, seed=5)
    (line,) = [record.message for record in caplog.records if record.name == "hf_dist"]
    assert line.endswith("doesn't hold classifier.bias, classifier.weight: drawn anew with --seed 5")


def test_a_head_of_another_size_needs_new_head(tiny, classifier):
    auto, three = AutoModelForSequenceClassification, with_classes(tiny, 3)
    with pytest.raises(ConfigError, match=r"classifier.* is 2.* in its file and 3.* here: .*--new_head"):
        load_model(three, auto, ModelConfig(model_name_or_path=str(classifier)), seed=1)
    named = ModelConfig(model_name_or_path=str(classifier), new_head=True)
    torch.manual_seed(1)
    first = load_model(three, auto, named, seed=1)
    torch.manual_seed(2)
    second = load_model(three, auto, named, seed=1)
    assert first.drawn == second.drawn == ("classifier.bias", "classifier.weight")
    assert first.model.classifier.weight.shape == (3, 8)
    assert torch.equal(weights(first.model), weights(second.model))
    pooler = BertForSequenceClassification.from_pretrained(classifier).bert.pooler.dense.weight
    assert torch.equal(first.model.bert.pooler.dense.weight, pooler)


def test_a_new_head_does_not_excuse_another_body(tiny, classifier):
    wider = BertConfig(**{**tiny.to_dict(), "intermediate_size": 32})
    named = ModelConfig(model_name_or_path=str(classifier), new_head=True)
    with pytest.raises(ConfigError, match="intermediate.*of another model.*--config_name"):
        load_model(wider, AutoModelForSequenceClassification, named, seed=1)


def test_a_model_of_another_kind_is_refused(tiny, tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "gpt"
    )
    named = ModelConfig(model_name_or_path=str(tmp_path / "gpt"))
    with pytest.raises(ConfigError, match="none of its weights is one of BertForMaskedLM's"):
        load_model(tiny, AutoModelForMaskedLM, named, seed=1)


def test_what_is_only_evaluated_must_be_whole(tiny, encoder, classifier):
    auto = AutoModelForSequenceClassification
    with pytest.raises(ConfigError, match="holds no bert.pooler.*not trained for this task.*--do_train"):
        load_model(tiny, auto, encoder, seed=1, complete=True)
    whole = load_model(tiny, auto, ModelConfig(model_name_or_path=str(classifier)), seed=1, complete=True)
    assert whole.drawn == ()
