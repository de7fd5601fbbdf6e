"""The built-in views, tokenizers and model of the encoder-decoder tasks."""

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_dist.data import builtin_seq2seq
from hf_dist.data.docstrings import docstrings, split_of


@pytest.fixture(scope="module")
def summaries():
    return builtin_seq2seq.summaries()


@pytest.fixture(scope="module")
def spoken():
    return builtin_seq2seq.spoken_python()


def test_summaries_are_first_lines_and_documents_lack_them(summaries):
    texts = {}
    for row in docstrings():
        name = f"{row.module}.{row.name}" if row.name else row.module
        texts.setdefault(name, []).append(row.text)
    for row in summaries["validation"].select(range(50)):
        name, _, body = row["document"].partition("\n\n")
        assert row["summary"] and body
        # A name may be defined twice; one of its texts is this one.
        whole = [" ".join(text.split()) for text in texts[name]]
        assert " ".join([row["summary"], *body.split()]) in whole


def test_sizes_and_splits(summaries, spoken):
    assert len(summaries["train"]) > 1500
    assert len(spoken["train"]) == 8000
    for view in (summaries, spoken):
        assert len(view["validation"]) == len(view["test"]) == builtin_seq2seq.MOST_EVALUATED
    assert all(split_of(text) == "validation" for text in summaries["validation"]["summary"])
    assert all(split_of(row["translation"]["python"]) == "test" for row in spoken["test"])


def test_no_text_lies_in_two_splits(summaries, spoken):
    for column, view in (("summary", summaries), ("document", summaries)):
        texts = {split: set(view[split][column]) for split in view}
        assert texts["train"].isdisjoint(texts["validation"] | texts["test"])
    sources = {split: {row["python"] for row in spoken[split]["translation"]} for split in spoken}
    assert sources["train"].isdisjoint(sources["validation"] | sources["test"])
    assert sum(len(rows) for rows in sources.values()) == sum(len(rows) for rows in spoken.values())


def test_the_view_is_a_function_of_the_library(spoken):
    again = builtin_seq2seq.spoken_python(most_trained=10)
    assert again["train"]["translation"] == spoken["train"]["translation"][:10]


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (builtin_seq2seq.spoken_python_tokenizer, "self._getValue[0]", "self . get value [ 0 ]"),
        (builtin_seq2seq.summary_tokenizer, "Return True if it's OK.", "return true if it's ok ."),
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
