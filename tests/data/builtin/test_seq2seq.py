"""The built-in views, tokenizers and model of the encoder-decoder tasks."""

import ast

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_dist.data.builtin import seq2seq as builtin_seq2seq
from hf_dist.data.builtin.docstrings import split_of


@pytest.fixture(scope="module")
def outlines():
    return builtin_seq2seq.outlines()


@pytest.fixture(scope="module")
def spoken():
    return builtin_seq2seq.spoken_python()


def test_outlines_name_the_function_first(outlines):
    for row in outlines["validation"]:
        [function] = ast.parse(row["document"]).body
        words = row["summary"].split(" with ")[0].split(" calls ")[0]
        assert words.replace(" ", "") in function.name.lower().replace("_", "")
        assert ast.get_docstring(function) is None


def test_sizes_and_splits(outlines, spoken):
    assert len(outlines["train"]) > 3000
    assert len(spoken["train"]) == 8000
    for view in (outlines, spoken):
        assert len(view["validation"]) == len(view["test"]) == builtin_seq2seq.MOST_EVALUATED
    assert all(split_of(text) == "validation" for text in outlines["validation"]["document"])
    assert all(split_of(row["python"]) == "test" for row in spoken["test"]["translation"])


def test_no_source_lies_in_two_splits_or_twice_in_one(outlines, spoken):
    views = (
        {split: outlines[split]["document"] for split in outlines},
        {split: [row["python"] for row in spoken[split]["translation"]] for split in spoken},
    )
    for sources in views:
        everywhere = [text for texts in sources.values() for text in texts]
        assert len(set(everywhere)) == len(everywhere)


def test_the_view_is_a_function_of_the_library(spoken):
    again = builtin_seq2seq.spoken_python(most_trained=10)
    assert again["train"]["translation"][:] == spoken["train"]["translation"][:10]


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (builtin_seq2seq.spoken_python_tokenizer, "self._getValue[0]", "self . get value [ 0 ]"),
        (builtin_seq2seq.outline_tokenizer, "Return True if it's OK.", "return true if it's ok ."),
    ],
)
def test_tokenizers_split_words_and_lower_them(make, text, words, tmp_path):
    tokenizer = make()
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == words
    assert (tokenizer.pad_token_id, len(tokenizer)) == (0, builtin_seq2seq.VOCABULARY)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def test_the_model_fits_its_tokenizer():
    tokenizer = builtin_seq2seq.spoken_python_tokenizer()
    config = builtin_seq2seq.small_t5(tokenizer)
    model = AutoModelForSeq2SeqLM.from_config(config)
    assert config.vocab_size == len(tokenizer) and config.is_encoder_decoder
    assert sum(weight.numel() for weight in model.parameters()) < 4_000_000
