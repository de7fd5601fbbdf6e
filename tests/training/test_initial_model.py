import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config, PretrainedConfig

from hf_dist.config import ModelConfig
from hf_dist.errors import ConfigError
from hf_dist.training.initial_model import initial_model_folder, load_model, set_dropout


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
    first = weights(load_model(tiny, auto, ModelConfig(), seed=7))
    torch.manual_seed(2)
    second = weights(load_model(tiny, auto, ModelConfig(), seed=7))
    assert torch.equal(first, second)
    assert not torch.equal(first, weights(load_model(tiny, auto, ModelConfig(), seed=8)))


def test_weights_are_those_of_from_config(tiny):
    auto = AutoModelForSequenceClassification
    torch.manual_seed(7)
    expected = weights(auto.from_config(tiny))
    assert torch.equal(weights(load_model(tiny, auto, ModelConfig(), seed=7)), expected)


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
