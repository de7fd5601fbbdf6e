"""Which tokens are hidden, and that it depends on seed, epoch and row alone."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
import torch
from transformers import BertForMaskedLM

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.masked_lm import MaskedLM, MaskedLMSettings

NO_MODEL = ModelConfig()
WORDS = "internationalization of documentation strings considered harmful by everybody nowadays "


@pytest.fixture
def prepare(tmp_path):
    def make(texts, *, model=NO_MODEL, length=64, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = DataConfig(max_length=length, train_file=str(path), validation_file=str(path))
        task = MaskedLM(MaskedLMSettings(**settings))
        raw = task.load(data, model)
        tokenizer = task.tokenizer(data, model)
        task.model_config(tokenizer, model)
        encoded, _ = task.encode(raw, tokenizer, data)
        return task, tokenizer, encoded

    return make


def test_a_long_text_gives_several_rows_and_loses_nothing(prepare):
    _, tokenizer, encoded = prepare([WORDS * 9, "short"], length=20)
    rows = encoded["train"]["input_ids"][:]
    plain = [token for row in rows[:-1] for token in row[1:-1]]
    assert plain == tokenizer(WORDS * 9, add_special_tokens=False)["input_ids"]
    assert all(row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id for row in rows)
    assert max(map(len, rows)) == 20


def test_shares_of_hidden_replaced_and_kept_tokens(prepare):
    task, tokenizer, encoded = prepare([WORDS * 4], length=200)
    row = encoded["train"][0]
    ids = np.array(row["input_ids"])
    ordinary = len(ids) - 2
    fates = []
    for number in range(400):
        batch = task.collate_rows([row], epoch=0, rows=[number])
        chosen = batch["labels"][0] != -100
        assert int(chosen.sum()) == round(0.15 * ordinary)
        assert not chosen[0] and not chosen[-1]
        assert (batch["labels"][0][chosen].numpy() == ids[chosen.numpy()]).all()
        assert (batch["input_ids"][0][~chosen].numpy() == ids[~chosen.numpy()]).all()
        shown = batch["input_ids"][0][chosen].numpy()
        fates.append([np.mean(shown == tokenizer.mask_token_id), np.mean(shown == ids[chosen.numpy()])])
    masked, kept = np.mean(fates, axis=0)
    # Of about 6,000 chosen tokens: 80 % +- 4 standard deviations, 10 % likewise.
    assert masked == pytest.approx(0.8, abs=0.021) and kept == pytest.approx(0.1, abs=0.016)


def test_the_mask_depends_on_seed_epoch_and_row_alone(prepare):
    task, _, encoded = prepare([WORDS, WORDS[::-1], "a b c d e f g"])
    rows = [encoded["train"][at] for at in range(3)]
    together = task.collate_rows(rows, epoch=2, rows=[5, 6, 7])
    for place in range(3):
        alone = task.collate_rows([rows[place]], epoch=2, rows=[5 + place])
        length = alone["input_ids"].shape[1]
        assert torch.equal(alone["input_ids"][0], together["input_ids"][place, :length])
        assert torch.equal(alone["labels"][0], together["labels"][place, :length])
        assert (together["labels"][place, length:] == -100).all()
    sent = pickle.loads(pickle.dumps(task)).collate_rows(rows, epoch=2, rows=[5, 6, 7])
    assert torch.equal(sent["input_ids"], together["input_ids"])
    for changed in (dict(epoch=3, rows=[5, 6, 7]), dict(epoch=2, rows=[6, 7, 8])):
        assert not torch.equal(task.collate_rows(rows, **changed)["labels"], together["labels"])
    task.seed = 1
    assert not torch.equal(task.collate_rows(rows, epoch=2, rows=[5, 6, 7])["labels"], together["labels"])


def test_whole_words_are_hidden_as_wholes(prepare):
    task, tokenizer, encoded = prepare([WORDS * 3], length=200, whole_word_mask=True)
    row = encoded["train"][0]
    words = tokenizer(WORDS * 3).word_ids()
    assert max(words.count(word) for word in set(words) - {None}) > 1
    sizes = []
    for number in range(100):
        chosen = task.collate_rows([row], epoch=0, rows=[number])["labels"][0] != -100
        hidden = {words[at] for at in range(len(words)) if chosen[at]}
        assert None not in hidden
        assert all(bool(chosen[at]) == (words[at] in hidden) for at in range(len(words)))
        sizes.append(int(chosen.sum()))
    wanted = round(0.15 * (len(words) - 2))
    assert max(sizes) <= wanted and np.mean(sizes) > 0.7 * wanted


def test_even_a_row_of_one_token_has_a_target(prepare):
    task, _, encoded = prepare(["a"], mlm_probability=0.01)
    assert int((task.collate([encoded["train"][0]])["labels"] != -100).sum()) == 1


def test_scores_are_those_of_a_plain_loop(prepare):
    task, tokenizer, encoded = prepare([WORDS, "one two three four", "a b c d e f g h i j k l"])
    torch.manual_seed(0)
    model = BertForMaskedLM(small_models.small_bert(tokenizer)).eval()
    rows = [encoded["validation"][at] for at in range(3)]
    batch = task.collate(rows)
    with torch.no_grad():
        found = task.score(task.predict(model(**batch), batch), encoded["validation"])
    losses = []
    for place, row in enumerate(rows):
        alone = task.collate_rows([row], epoch=0, rows=[place])
        with torch.no_grad():
            logs = model(**{k: v for k, v in alone.items() if k != "labels"}).logits[0].log_softmax(-1)
        losses += [
            -logs[at, label].item() for at, label in enumerate(alone["labels"][0].tolist()) if label != -100
        ]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_the_baseline_knows_no_special_tokens(prepare):
    task, tokenizer, _ = prepare(["a a a a"])
    shares = torch.exp(-task._unigram)
    assert float(shares.sum()) == pytest.approx(1.0)
    assert float(shares[tokenizer.cls_token_id]) == 0.0


def test_faults(prepare, tmp_path):
    with pytest.raises(DataError, match="blank in every row"):
        prepare([" "])
    with pytest.raises(ConfigError, match="--mlm_probability is 0"):
        MaskedLMSettings(mlm_probability=0.0)
    small_models.causal_tokenizer().save_pretrained(tmp_path / "causal")
    with pytest.raises(ConfigError, match="no mask token"):
        prepare(["a b"], model=ModelConfig(tokenizer_name=str(tmp_path / "causal")))
