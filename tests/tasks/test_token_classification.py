"""The task without a Trainer: schemes, alignment, words that are cut, scores and faults."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import seqeval.metrics
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from sklearn.metrics import accuracy_score, f1_score
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, PreTrainedTokenizerFast, RobertaConfig

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks import pretrained
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.token_classification.rows import TokenClassificationSettings as Settings
from hf_dist.tasks.token_classification.schemes import Openings, inside_of, openings, recognise
from hf_dist.tasks.token_classification.task import TokenClassification

NO_MODEL = ModelConfig()
BIO = [
    (["Ann", "Lee", "lives", "in", "Rome"], ["B-PER", "I-PER", "O", "O", "B-LOC"]),
    (["Rome", "is", "old"], ["B-LOC", "O", "O"]),
    (["she", "left"], ["O", "O"]),
    (["Lee", "left", "Rome"], ["B-PER", "O", "B-LOC"]),
]


def json_lines(path: Path, rows: list, names: tuple[str, str] = ("tokens", "tags")) -> str:
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return str(path)


def loaded(tmp_path, train=BIO, validation=None, model=NO_MODEL, settings=None, **data):
    """The task with its raw and encoded splits."""
    task = TokenClassification(settings)
    config = DataConfig(
        train_file=json_lines(tmp_path / "train.jsonl", train),
        validation_file=json_lines(tmp_path / "dev.jsonl", validation or BIO),
        **{"max_length": 64, **data},
    )
    raw = task.load(config, model)
    tokenizer = task.tokenizer(config, model)
    task.model_config(tokenizer, model)
    encoded, truncated = task.encode(raw, tokenizer, config)
    return task, tokenizer, encoded, truncated


def perfect(task, rows) -> list[np.ndarray]:
    """What a model would predict that is always right at the first sub-words, and wrong elsewhere."""
    found = []
    for row in rows:
        tags = np.full(len(row["input_ids"]), len(task.classes) - 1)
        for place, tag in zip(row["first"], row["tags"], strict=True):
            if place >= 0:
                tags[place] = tag
        found.append(tags)
    return found


@pytest.mark.parametrize(
    "tags, wanted, scheme",
    [
        (["O", "B-a", "I-a"], "auto", "iob2"),
        (["O", "B-a"], "auto", "iob2"),
        (["O", "I-a", "I-b"], "auto", "iob1"),
        (["O", "B-a", "I-a"], "iob1", "iob1"),
        (["O", "B-a", "I-a", "E-a", "S-b-c"], "auto", "iobes"),
        (["O", "B-a", "L-a", "U-a"], "auto", "bilou"),
        (["B", "I", "O"], "auto", "iob2"),
        (["O", "B-a", "I-a"], "plain", "plain"),
        (["NOUN", "VERB"], "auto", "plain"),
        (["I", "E"], "auto", "plain"),
        (["B-a", "NN"], "auto", "plain"),
        (["O"], "auto", "plain"),
        (["0", "1"], "auto", "plain"),
    ],
)
def test_schemes_are_recognised_by_their_tags(tags, wanted, scheme):
    assert recognise(tags, wanted) == scheme


@pytest.mark.parametrize(
    "rows, expected, scheme",
    [
        # CoNLL-2003 as it was published: B- only where an entity follows one of its type.
        (["O I-a I-a O", "I-a B-a I-b"], Openings(inside=3, begin=0), "iob1"),
        (["B-a I-a O B-b", "B-a B-a"], Openings(inside=0, begin=4 - 1), "iob2"),
        # A slip in either.
        (["B-a I-a", "B-b", "O I-a"], Openings(inside=1, begin=2), "iob2"),
        (["I-a I-a", "I-b O I-b", "B-a"], Openings(inside=3, begin=1), "iob1"),
        (["B I", "I O B B"], Openings(inside=1, begin=2), "iob2"),
        (["S-a O", "B-a E-a"], Openings(inside=0, begin=1), "iobes"),
    ],
)
def test_iob1_is_told_by_how_entities_open(rows, expected, scheme):
    tags = [tag for row in rows for tag in row.split()]
    ends = np.cumsum([0, *(len(row.split()) for row in rows)])
    found = openings(pa.chunked_array([pa.array(tags)]), ends)
    assert found == expected
    assert recognise(sorted({*tags, "O"}), "auto", found) == scheme


def test_tags_outside_of_their_scheme_are_named(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_dist"):
        logging.getLogger("hf_dist").propagate = True
        loaded(tmp_path, train=[*BIO, (["a"], ["I-PER"])])
        assert "scheme IOB2: a B- opens each entity" in caplog.text
        assert "1 entities open with an I-, which is not well formed in IOB2" in caplog.text
        caplog.clear()
        loaded(tmp_path, train=[*BIO, (["a"], ["_"])])
        assert "scheme plain" in caplog.text and "as most others are: _;" in caplog.text


def test_a_scheme_that_the_tags_are_not_in():
    with pytest.raises(ConfigError, match="--tag_scheme iobes: the tags are NOUN, VERB; expected O, B-TYPE"):
        recognise(["NOUN", "VERB"], "iobes")


def test_labels_stand_at_first_sub_words(tmp_path):
    rows = [(["get_payload", "x", "unbelievable"], ["B-a", "O", "B-b"]), (["x"], ["O"]), (["x"], ["I-a"])]
    task, tokenizer, encoded, _ = loaded(tmp_path, train=rows, validation=rows)
    row = encoded["train"][0]
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in rows[0][0]]
    assert len(words[0]) > 1 and len(words[2]) > 1
    assert row["input_ids"] == [
        tokenizer.cls_token_id,
        *words[0],
        *words[1],
        *words[2],
        tokenizer.sep_token_id,
    ]
    expected = [-100]
    for ids, tag in zip(words, rows[0][1], strict=True):
        expected += [task.classes.index(tag), *[-100] * (len(ids) - 1)]
    assert row["labels"] == [*expected, -100]
    assert encoded["validation"][0]["first"] == [1, 1 + len(words[0]), 1 + len(words[0]) + len(words[1])]


def test_all_sub_words_can_be_labelled_and_go_on_inside_the_entity(tmp_path):
    rows = [(["get_payload", "unbelievable"], ["B-a", "B-b"]), (["x"], ["O"]), (["x"], ["I-a"])]
    task, _, encoded, _ = loaded(
        tmp_path, train=rows, validation=rows, settings=Settings(label_all_tokens=True)
    )
    names = [task.classes[tag] if tag >= 0 else None for tag in encoded["train"][0]["labels"]]
    b_at = names.index("B-b")
    assert names[0] is None and names[-1] is None
    assert names[1] == "B-a" and set(names[2:b_at]) == {"I-a"}
    # There is no I-b: its sub-words keep the tag of the word.
    assert set(names[b_at:-1]) == {"B-b"}
    assert inside_of(("B-x", "I-x", "S-x", "O", "B")) == (1, 1, 2, 3, 4)


def test_a_batch_is_padded_with_ignored_labels(tmp_path):
    task, _, encoded, _ = loaded(tmp_path)
    rows = [
        {name: row[name] for name in ("input_ids", "token_type_ids", "labels")} for row in encoded["train"]
    ]
    batch = task.collate(rows)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    for at, row in enumerate(rows):
        assert batch["labels"][at, : len(row["labels"])].tolist() == row["labels"]
    sent = pickle.loads(pickle.dumps(task)).collate(rows)
    assert all(torch.equal(sent[name], batch[name]) for name in batch)
    assert task.items == TokenItems(shift=False)


def test_left_padding_moves_labels_along(tmp_path, monkeypatch):
    """Only of a model that reads a text at the end of its row, such as XLNet."""
    monkeypatch.setattr(pretrained, "_PADDED_LEFT", frozenset({"bert"}))
    task, tokenizer, encoded, _ = loaded(tmp_path)
    tokenizer.padding_side = "left"
    task.model_config(tokenizer, NO_MODEL)
    task.encode(DatasetDict(), tokenizer, DataConfig())
    rows = [encoded["validation"][at] for at in (0, 2)]
    batch = task.collate(rows)
    assert batch["labels"][1, -len(rows[1]["labels"]) :].tolist() == rows[1]["labels"]
    logits = torch.nn.functional.one_hot(batch["labels"].clamp(min=0), len(task.classes)).float()
    predictions = task.predict({"logits": logits}, batch)
    assert [len(found) for found in predictions] == [len(row["input_ids"]) for row in rows]
    assert list(task.records(predictions, encoded["validation"].select([0, 2]))) == [
        {"tokens": BIO[at][0], "tags": BIO[at][1]} for at in (0, 2)
    ]


def test_scores_are_those_of_seqeval_by_word(tmp_path):
    """Predictions that are right but for one word, and a baseline that is recomputed here."""
    validation = [(["Lee", "saw", "Paris"], ["B-PER", "O", "B-LOC"]), (["old", "Rome"], ["B-LOC", "I-LOC"])]
    train = [*BIO, (["x"], ["I-LOC"])]
    task, _, encoded, _ = loaded(tmp_path, train=train, validation=validation)
    rows = encoded["validation"]
    predictions = perfect(task, rows)
    predictions[1][rows[1]["first"][0]] = task.classes.index("O")
    scores = task.score(predictions, rows)
    references = [tags for _, tags in validation]
    found = [["B-PER", "O", "B-LOC"], ["O", "I-LOC"]]
    assert scores["f1"] == pytest.approx(seqeval.metrics.f1_score(references, found), abs=1e-12)
    assert scores["accuracy"] == 4 / 5
    # Lee: once I-PER and once B-PER (the smaller id wins); Rome B-LOC; old O; saw and Paris are new: O.
    guesses = [["B-PER", "O", "O"], ["O", "B-LOC"]]
    assert scores["f1_baseline"] == pytest.approx(seqeval.metrics.f1_score(references, guesses), abs=1e-12)
    assert scores["accuracy_baseline"] == 2 / 5
    assert task.best_metric == "f1"


def test_plain_tags_and_numbers(tmp_path):
    rows = [(["a", "b"], [10, 2]), (["b", "a", "c"], [2, 10, 10]), (["b"], [2])]
    task, _, encoded, _ = loaded(tmp_path, train=rows, validation=rows[:2])
    assert task.classes == ("2", "10") and task.scheme == "plain" and task.best_metric == "accuracy"
    predictions = perfect(task, encoded["validation"])
    predictions[0][encoded["validation"][0]["first"][0]] = 0
    true, found = ["10", "2", "2", "10", "10"], ["2", "2", "2", "10", "10"]
    assert task.score(predictions, encoded["validation"]) == pytest.approx(
        {
            "accuracy": accuracy_score(true, found),
            "f1_macro": f1_score(true, found, average="macro"),
            "accuracy_baseline": 1.0,
            "f1_macro_baseline": 1.0,
        },
        abs=1e-12,
    )


def test_a_class_label_keeps_its_names_and_order(tmp_path):
    features = Features(
        {"words": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "I-X", "B-X"]))}
    )
    rows = Dataset.from_dict({"words": [["a", "b"], ["c"]], "ner_tags": [[2, 1], [0]]}, features=features)
    for split in ("train", "validation"):
        rows.to_parquet(str(tmp_path / f"{split}.parquet"))
    task = TokenClassification()
    raw = task.load(DataConfig(dataset_name=str(tmp_path)), NO_MODEL)
    assert task.classes == ("O", "I-X", "B-X") and raw["train"]["tags"][:] == [[2, 1], [0]]


def test_cut_words_are_counted_and_predicted_as_outside(tmp_path, caplog):
    long = (["Rome"] * 40, ["B-LOC"] * 40)
    with caplog.at_level(logging.WARNING, logger="hf_dist"):
        logging.getLogger("hf_dist").propagate = True
        task, _, encoded, truncated = loaded(
            tmp_path, train=[*BIO, long], validation=[long, BIO[1]], max_length=12
        )
    assert truncated == {"train": 1, "validation": 1}
    first = encoded["validation"][0]["first"]
    kept = sum(place >= 0 for place in first)
    assert len(first) == 40 and 0 < kept <= 10 and first[kept:] == [-1] * (40 - kept)
    assert f"validation: {40 - kept} of 43 words are beyond --max_length" in caplog.text
    predictions = perfect(task, encoded["validation"])
    tags = next(iter(task.records(predictions, encoded["validation"])))["tags"]
    assert tags == ["B-LOC"] * kept + ["O"] * (40 - kept)
    assert task.score(predictions, encoded["validation"])["recall"] == pytest.approx((kept + 1) / 41)


def test_words_of_which_the_tokenizer_leaves_nothing_keep_the_others_in_step(tmp_path):
    """BERT's normaliser removes control characters, so that such a word has no token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_without_controls(), pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(tmp_path / "t")
    rows = [(["a", "\u200d", "b"], ["B-X", "B-X", "O"]), (["b"], ["I-X"])]
    task, _, encoded, _ = loaded(
        tmp_path, train=rows, validation=rows, model=ModelConfig(tokenizer_name=str(tmp_path / "t"))
    )
    assert encoded["validation"][0]["first"] == [0, -1, 1]
    assert [task.classes[tag] for tag in encoded["train"][0]["labels"]] == ["B-X", "O"]
    records = list(task.records(perfect(task, encoded["validation"]), encoded["validation"]))
    assert records[0]["tags"] == ["B-X", "O", "O"]


def _tokenizer_without_controls() -> Tokenizer:
    from tokenizers import normalizers

    made = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, "[UNK]"))
    made.normalizer = normalizers.Replace("\u200d", "")
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_byte_level_tokenizers_see_a_space_before_each_word(tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["pre_tokenizer"]["add_prefix_space"] = False
    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="[PAD]", unk_token="[UNK]"
    )
    bare.save_pretrained(tmp_path / "t")
    RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, pad_token_id=0,
    ).save_pretrained(tmp_path / "t")  # fmt: skip
    model = ModelConfig(model_name_or_path=str(tmp_path / "t"))
    _, _, encoded, _ = loaded(tmp_path, model=model)
    expected = tokenizer(" Rome is old", add_special_tokens=False)["input_ids"]
    ids = encoded["validation"][1]["input_ids"]
    assert ids[1:-1] == expected


def test_a_batch_has_only_what_the_model_takes(tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path / "m")
    DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2, hidden_dim=64).save_pretrained(
        tmp_path / "m"
    )
    task, _, encoded, _ = loaded(tmp_path, model=ModelConfig(model_name_or_path=str(tmp_path / "m")))
    assert set(task.collate([encoded["train"][0]])) == {"input_ids", "attention_mask", "labels"}


def test_evaluation_alone_takes_the_tags_of_the_model(tmp_path):
    names = {0: "O", 1: "I-LOC", 2: "B-LOC", 3: "B-PER", 4: "I-PER"}
    small_models.small_bert(small_models.bpe_tokenizer(), id2label=names).save_pretrained(tmp_path / "m")
    small_models.bpe_tokenizer().save_pretrained(tmp_path / "m")
    model = ModelConfig(model_name_or_path=str(tmp_path / "m"))
    data = DataConfig(validation_file=json_lines(tmp_path / "dev.jsonl", BIO), max_length=64)
    task = TokenClassification()
    raw = task.load(data, model)
    assert task.classes == tuple(names.values())
    assert raw["validation"]["tags"][1] == [2, 0, 0]
    encoded, _ = task.encode(raw, task.tokenizer(data, model), data)
    # Without training rows the baseline is the commonest tag of these rows, O: 7 of 13 words.
    scores = task.score(perfect(task, encoded["validation"]), encoded["validation"])
    assert (scores["f1"], scores["f1_baseline"], scores["accuracy_baseline"]) == (1.0, 0.0, 7 / 13)
    with pytest.raises(DataError, match="--train_file"):
        TokenClassification().load(data, NO_MODEL)


def test_a_test_split_without_tags_can_be_predicted(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"tokens": ["Rome", "fell"]}) + "\n")
    task, tokenizer, _, _ = loaded(tmp_path)
    data = DataConfig(
        train_file=str(tmp_path / "train.jsonl"),
        validation_file=str(tmp_path / "dev.jsonl"),
        test_file=str(path),
    )
    raw = task.load(data, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert "labels" not in encoded["test"].column_names
    assert "labels" not in task.collate([encoded["test"][0]])
    tags = np.full(len(encoded["test"][0]["input_ids"]), task.classes.index("O"))
    assert list(task.records([tags], encoded["test"])) == [{"tokens": ["Rome", "fell"], "tags": ["O", "O"]}]


def test_held_out_rows(tmp_path):
    rows = [([f"w{at}"], ["B-X" if at % 2 else "O"]) for at in range(40)]
    data = DataConfig(train_file=json_lines(tmp_path / "a.jsonl", rows), validation_fraction=0.25)
    raw = TokenClassification().load(data, NO_MODEL)
    assert (len(raw["train"]), len(raw["validation"])) == (30, 10)
    assert {row[0] for row in raw["train"]["tokens"]}.isdisjoint(
        row[0] for row in raw["validation"]["tokens"]
    )


@pytest.mark.parametrize(
    "rows, says",
    [
        ([(["a", "b"], ["O"]), (["a"], ["B-X"])], r"row 1 \(counted from 1\): 2 words in tokens and 1 tags"),
        ([(["a"], ["O"]), ([], [])], "has no words in row 2"),
        ([(["a"], ["O"]), (None, ["O"])], "has no words in row 2"),
        ([(["a"], ["O"]), (["b"], None)], "has no tags in row 2"),
        ([(["a"], ["O"]), (["b", "c"], ["O", None])], r"row 2 \(counted from 1\): the word 'c' has no tag"),
        ([(["a"], ["O"]), (["b", ""], ["O", "O"])], r"row 2 \(counted from 1\): word 2 is empty"),
        ([(["a"], ["O"]), (["b", None], ["O", "O"])], r"row 2 \(counted from 1\): word 2 is empty"),
        ([("a b", "O O")], "tokens of the train data holds text; expected a list of words a row"),
        ([(["a"], [0.5]), (["a"], [1.5])], "holds fractions"),
        ([([1, 2], ["O", "B-X"])], "holds lists of int64; expected lists of words"),
        ([(["a", "b"], ["O", "O"])], r"one tag in all training rows \(O\)"),
    ],
)
def test_faults_in_rows(tmp_path, rows, says):
    data = DataConfig(train_file=json_lines(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=says):
        TokenClassification().load(data, NO_MODEL)


def test_faults_between_splits(tmp_path):
    with pytest.raises(
        DataError, match=r"only tags that the training data never shows: B-ORG .*, first in row 1"
    ):
        loaded(tmp_path, validation=[(["c"], ["B-ORG"])])
    other = json_lines(tmp_path / "other.jsonl", BIO, names=("words", "tags"))
    data = DataConfig(train_file=str(tmp_path / "train.jsonl"), validation_file=other)
    with pytest.raises(DataError, match="validation data has no column tokens.*it has words, tags"):
        TokenClassification().load(data, NO_MODEL)
    with pytest.raises(
        DataError, match=r"--tags_column tag: there is no such column \(did you mean tags\?\)"
    ):
        TokenClassification(Settings(tags_column="tag")).load(data, NO_MODEL)
    with pytest.raises(DataError, match="must be different"):
        TokenClassification(Settings(tags_column="tokens")).load(data, NO_MODEL)


def test_truncation_that_leaves_a_row_without_labels(tmp_path):
    with pytest.raises(DataError, match="no label left in rows 1, 2, 3, 4 .* --max_length 2"):
        loaded(tmp_path, max_length=2)


def test_built_in_data_end_to_end():
    task = TokenClassification()
    data = DataConfig(max_train_samples=32, max_eval_samples=8, max_predict_samples=8, max_length=64)
    raw = task.load(data, NO_MODEL)
    assert isinstance(raw, DatasetDict) and task.scheme == "iob2"
    tokenizer = task.tokenizer(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert config.id2label == dict(enumerate(task.classes)) and len(encoded["train"]) == 32
    assert set(encoded["train"].column_names) == {"input_ids", "token_type_ids", "labels"}
    torch.manual_seed(0)
    model = task.auto_class.from_config(config)
    batch = task.collate([encoded["train"][at] for at in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        outputs = model(**batch)
        losses.append(outputs.loss.item())
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(np.log(len(task.classes)), abs=0.5) and losses[-1] < 0.6 * losses[0]
