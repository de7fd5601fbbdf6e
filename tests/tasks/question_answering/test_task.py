"""The task without a Trainer: windows, positions, answers of several windows, scores and faults."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks import pretrained
from hf_dist.tasks.items import SpanItems
from hf_dist.tasks.question_answering.rows import QuestionAnsweringSettings as Settings
from hf_dist.tasks.question_answering.task import QuestionAnswering

NO_MODEL = ModelConfig()
SMALL = Settings(doc_stride=8, max_question_tokens=12)
FILLER = "Nothing is said here about it, and nothing there. " * 4
CONTEXT = f"{FILLER}The river Elbe flows through Dresden. {FILLER}It ends near Hamburg."


def row(name, question, context, *answers, starts=None) -> dict:
    starts = starts or [context.find(text) for text in answers]
    return {
        "id": name,
        "question": question,
        "context": context,
        "answers": {"text": list(answers), "answer_start": starts},
    }


ROWS = [
    row("a", "What flows?", CONTEXT, "The river Elbe", "Elbe"),
    row("b", "Where does it end?", CONTEXT, "near Hamburg"),
    row("c", "Who?", "Ann asked, and Lee answered.", "Lee"),
]
UNANSWERED = row("d", "Why?", "Ann asked, and Lee answered.")


def json_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def loaded(tmp_path, train=ROWS, validation=None, model=NO_MODEL, settings=SMALL, **data):
    task = QuestionAnswering(settings)
    config = DataConfig(
        train_file=json_lines(tmp_path / "train.jsonl", train),
        validation_file=json_lines(tmp_path / "dev.jsonl", validation or train),
        **{"max_length": 48, **data},
    )
    raw = task.load(config, model)
    tokenizer = task.tokenizer(config, model)
    task.model_config(tokenizer, model)
    encoded, _ = task.encode(raw, tokenizer, config)
    return task, tokenizer, encoded


def sure(task, rows) -> list:
    """What a model predicts whose logits are 9 at the true positions of each window and 0 elsewhere."""
    found = []
    for one in rows:
        example = {name: one[name] for name in ("input_ids", "token_type_ids")}
        batch = task.collate([example])
        logits = torch.zeros(2, *batch["input_ids"].shape)
        logits[0, 0, one["start_positions"]] = logits[1, 0, one["end_positions"]] = 9.0
        found += task.predict({"start_logits": logits[0], "end_logits": logits[1]}, batch)
    return found


def test_positions_read_back_as_the_answer_in_the_windows_that_hold_it(tmp_path):
    _, tokenizer, encoded = loaded(tmp_path)
    rows = encoded["validation"]
    names = [one["id"] for one in rows]
    assert [name for name in names if name] == ["a", "b", "c"] and len(rows) > 6
    texts: dict[str, set[str]] = {}
    current = ""
    for one in rows:
        current = one["id"] or current
        start, end = one["start_positions"], one["end_positions"]
        if start == end == 0:
            assert one["input_ids"][0] == tokenizer.cls_token_id
            continue
        offsets = np.array(one["offsets"]).reshape(-1, 2)
        context = ROWS["abc".index(current)]["context"]
        texts.setdefault(current, set()).add(context[offsets[start, 0] : offsets[end, 1]])
        assert tokenizer.decode(one["input_ids"][start : end + 1]).strip() in texts[current]
    assert texts == {"a": {"The river Elbe"}, "b": {"near Hamburg"}, "c": {"Lee"}}
    assert all(len(one["input_ids"]) <= 48 for one in rows)


def test_training_rows_keep_no_text(tmp_path):
    _, _, encoded = loaded(tmp_path)
    assert set(encoded["train"].column_names) == {
        "input_ids", "token_type_ids", "start_positions", "end_positions"
    }  # fmt: skip
    assert len(encoded["train"]) == len(encoded["validation"])


def test_a_batch(tmp_path):
    task, _, encoded = loaded(tmp_path)
    rows = [encoded["train"][at] for at in range(4)]
    batch = task.collate(rows)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "start_positions", "end_positions"}
    assert batch["end_positions"].tolist() == [one["end_positions"] for one in rows]
    assert task.items == SpanItems()
    sent = pickle.loads(pickle.dumps(task)).collate(rows)
    assert all(torch.equal(sent[name], batch[name]) for name in batch)


def test_left_padding_moves_positions_along(tmp_path, monkeypatch):
    """Only of a model that reads a text at the end of its row, such as XLNet."""
    monkeypatch.setattr(pretrained, "_PADDED_LEFT", frozenset({"bert"}))
    task, tokenizer, encoded = loaded(tmp_path)
    rows = list(encoded["validation"])
    tokenizer.padding_side = "left"
    task.model_config(tokenizer, NO_MODEL)
    task.pads_with(tokenizer)
    short, long = min(rows, key=lambda one: len(one["input_ids"])), rows[0]
    batch = task.collate([short, long])
    for at, one in enumerate((short, long)):
        assert (
            batch["input_ids"][at, batch["start_positions"][at]] == one["input_ids"][one["start_positions"]]
        )
    logits = torch.nn.functional.one_hot(batch["start_positions"], batch["input_ids"].shape[1]).float()
    found = task.predict({"start_logits": logits, "end_logits": logits}, batch)
    assert [one.starts[0] for one in found] == [one["start_positions"] for one in (short, long)]


def test_answers_of_several_windows_and_scores(tmp_path):
    """Sure predictions are right; then the windows of one question are taken for those without an answer."""
    task, _, encoded = loaded(tmp_path)
    rows = encoded["validation"]
    predictions = sure(task, rows)
    scores = task.score(predictions, rows)
    assert (scores["exact_match"], scores["f1"]) == (100.0, 100.0)
    assert not task.with_negative and "has_answer_f1" not in scores
    records = list(task.records(predictions, rows))
    assert [(one["id"], one["prediction"]) for one in records] == [
        ("a", "The river Elbe"), ("b", "near Hamburg"), ("c", "Lee")
    ]  # fmt: skip
    assert records[1]["start"] == CONTEXT.index("near Hamburg") and records[1]["score"] == 18.0

    wrong = [
        predictions[0] if one["id"] == "c" else found for one, found in zip(rows, predictions, strict=True)
    ]
    assert task.score(wrong, rows)["exact_match"] == pytest.approx(200 / 3)


def test_no_answer(tmp_path):
    task, _, encoded = loaded(tmp_path, train=[*ROWS, UNANSWERED])
    assert task.with_negative
    rows = encoded["validation"]
    predictions = sure(task, rows)
    scores = task.score(predictions, rows)
    assert (scores["exact_match"], scores["no_answer_exact"], scores["has_answer_f1"]) == (100, 100, 100)
    records = list(task.records(predictions, rows))
    assert (records[3]["prediction"], records[3]["start"]) == ("", None)
    assert records[3]["null_score"] == 18.0 - 0.0 and records[2]["null_score"] == 0.0 - 18.0

    eager = QuestionAnswering(Settings(doc_stride=8, max_question_tokens=12, null_score_diff_threshold=100.0))
    raw = eager.load(DataConfig(validation_file=str(tmp_path / "dev.jsonl"), max_length=48), NO_MODEL)
    assert eager.with_negative and set(raw) == {"validation"}
    assert eager.score(predictions, rows)["no_answer_exact"] == 0


def test_negatives_can_be_asked_for(tmp_path):
    assert not loaded(tmp_path)[0].with_negative
    settings = Settings(doc_stride=8, max_question_tokens=12, version_2_with_negative=True)
    assert loaded(tmp_path, settings=settings)[0].with_negative


def test_the_baseline_is_the_best_constant_sentence(tmp_path):
    """The pieces of the first context are A: B c. D: E. and the second one is right in two of three rows."""
    rows = [
        row("1", "q", "A: B c. D: E.", "B c."),
        row("2", "q", "F: G. H: I.", "G."),
        row("3", "q", "J: K. L: M.", "M."),
    ]
    task, _, encoded = loaded(tmp_path, train=rows)
    scores = task.score(sure(task, encoded["validation"]), encoded["validation"])
    assert scores["exact_match_baseline"] == scores["f1_baseline"] == pytest.approx(200 / 3)
    assert scores["exact_match"] == 100
    negatives = [UNANSWERED, {**UNANSWERED, "id": "e"}, {**UNANSWERED, "id": "f"}]
    task, _, encoded = loaded(tmp_path, train=[rows[0], *negatives])
    scores = task.score(sure(task, encoded["validation"]), encoded["validation"])
    assert scores["f1_baseline"] == 75  # nothing, always


@pytest.mark.parametrize(
    "answers",
    [
        {"text": ["Lee"], "answer_start": [15]},
        [{"text": "Lee", "answer_start": 15}],
        {"text": "Lee", "answer_start": 15},
    ],
)
def test_forms_of_answers(tmp_path, answers):
    one = {**ROWS[2], "answers": answers}
    data = DataConfig(validation_file=json_lines(tmp_path / "a.jsonl", [one]), max_length=48)
    raw = QuestionAnswering(SMALL).load(data, NO_MODEL)
    assert raw["validation"][0]["answers"] == {"text": ["Lee"], "answer_start": [15]}


def test_white_space_around_an_answer_is_no_part_of_its_tokens(tmp_path):
    context = "Ann asked, and  Lee  answered."
    task, _, encoded = loaded(tmp_path, train=[row("x", "Who?", context, "  Lee "), ROWS[2]])
    predictions = sure(task, encoded["validation"])
    assert [one["prediction"] for one in task.records(predictions, encoded["validation"])] == ["Lee", "Lee"]


def test_ids_are_row_numbers_where_there_are_none(tmp_path):
    rows = [{name: one[name] for name in ("question", "context", "answers")} for one in ROWS]
    raw = QuestionAnswering(SMALL).load(
        DataConfig(validation_file=json_lines(tmp_path / "a.jsonl", rows)), NO_MODEL
    )
    assert raw["validation"]["id"][:] == ["0", "1", "2"]


def test_no_context_is_in_both_splits(tmp_path):
    rows = [row(f"{c}-{q}", "Who?", f"Context {c} has Lee.", "Lee") for c in range(20) for q in range(3)]
    data = DataConfig(train_file=json_lines(tmp_path / "a.jsonl", rows), validation_fraction=0.2)
    raw = QuestionAnswering(SMALL).load(data, NO_MODEL)
    assert (len(raw["train"]), len(raw["validation"])) == (48, 12)
    assert set(raw["train"]["context"]).isdisjoint(raw["validation"]["context"])
    one = DataConfig(train_file=json_lines(tmp_path / "b.jsonl", rows[:3]))
    with pytest.raises(DataError, match="--validation_file"):
        QuestionAnswering(SMALL).load(one, NO_MODEL)


def test_a_test_split_without_answers_can_be_predicted(tmp_path):
    asked = [{name: one[name] for name in ("id", "question", "context")} for one in ROWS]
    data = DataConfig(test_file=json_lines(tmp_path / "test.jsonl", asked), max_length=48)
    task = QuestionAnswering(SMALL)
    raw = task.load(data, NO_MODEL)
    encoded, _ = task.encode(raw, task.tokenizer(data, NO_MODEL), data)
    rows = encoded["test"]
    assert "start_positions" not in task.collate([rows[0]])
    batch = task.collate([rows[at] for at in range(len(rows))])
    logits = torch.rand(2, *batch["input_ids"].shape)
    records = list(
        task.records(task.predict({"start_logits": logits[0], "end_logits": logits[1]}, batch), rows)
    )
    assert [one["id"] for one in records] == ["a", "b", "c"]
    assert all(one["prediction"] in asked[at]["context"] for at, one in enumerate(records))


def test_long_questions_are_cut_and_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_dist"):
        logging.getLogger("hf_dist").propagate = True
        _, _, encoded = loaded(tmp_path, train=[*ROWS, {**ROWS[2], "id": "e", "question": "who said " * 20}])
    assert "train: 1 questions are cut to --max_question_tokens 12" in caplog.text
    assert max(len(one) for one in encoded["train"]["input_ids"]) <= 48


def test_a_batch_has_only_what_the_model_takes(tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path / "m")
    DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2, hidden_dim=64).save_pretrained(
        tmp_path / "m"
    )
    task, _, encoded = loaded(tmp_path, model=ModelConfig(model_name_or_path=str(tmp_path / "m")))
    assert set(task.collate([encoded["train"][0]])) == {
        "input_ids", "attention_mask", "start_positions", "end_positions"
    }  # fmt: skip


@pytest.mark.parametrize(
    "rows, says",
    [
        (
            [ROWS[2], row("x", "q", "One two.", "two", starts=[3])],
            r"row 2 \(counted from 1\), id x: the answer 'two' is not at character 3, where the context has "
            r"' tw' \(it stands at 4\)",
        ),
        ([row("x", "q", "One two.", "three", starts=[4])], r"the context doesn't hold it"),
        ([row("x", "q", "One two.", "two", starts=[-4])], "not at character -4"),
        ([row("x", "q", "One two.", " ", starts=[3])], "blank"),
        ([ROWS[2], {**ROWS[1], "id": "c"}], r"has the id c in rows 1 and 2"),
        ([ROWS[2], {**ROWS[1], "id": None}], "has no id in row 2"),
        ([ROWS[2], {**ROWS[1], "answers": None}], "has no answers in row 2"),
        ([ROWS[2], {**ROWS[1], "question": None}], "column question of the train data has no text in row 2"),
        ([ROWS[2], {**ROWS[1], "question": " "}], "column question of the train data is blank in row 2"),
        ([ROWS[2], {**ROWS[1], "context": ""}], "column context of the train data is blank in row 2"),
        (
            [ROWS[2], {**ROWS[1], "answers": {"text": ["a", "b"], "answer_start": [1]}}],
            r"row 2 \(counted from 1\).*two lists of one length",
        ),
        ([{**ROWS[2], "answers": "Lee"}], "expected an object of text and answer_start"),
        ([UNANSWERED], "no question of the training data has an answer"),
        ([{"id": "a", "question": "q", "context": "c"}], "--answers_column"),
        ([{**ROWS[2], "question": 3}], "question of the train data holds numbers .int64.; expected text"),
    ],
)
def test_faults_in_rows(tmp_path, rows, says):
    data = DataConfig(train_file=json_lines(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=says):
        QuestionAnswering(SMALL).load(data, NO_MODEL)


def test_misplaced_answers_can_be_dropped_and_are_counted(tmp_path, caplog):
    wrong = row("x", "q", "One two.", "two", starts=[3])
    settings = Settings(doc_stride=8, max_question_tokens=12, misplaced_answers="drop")
    with caplog.at_level(logging.WARNING, logger="hf_dist"):
        logging.getLogger("hf_dist").propagate = True
        loaded(tmp_path, train=[*ROWS, wrong, {**wrong, "id": "y"}], settings=settings)
    assert "train: 2 rows with an answer that is not at its place are left out" in caplog.text
    with pytest.raises(DataError, match="no row of the train data"):
        loaded(tmp_path, train=[wrong], settings=settings)


def test_an_answer_that_no_window_holds(tmp_path):
    long = row("long", "What?", CONTEXT, CONTEXT[:300].strip())
    with pytest.raises(
        DataError, match=r"the answer of id long lies whole in no window; raise --doc_stride \(8\)"
    ):
        loaded(tmp_path, train=[*ROWS, long])
    # In evaluation its text still counts.
    _, _, encoded = loaded(tmp_path, validation=[*ROWS, long])
    assert [one for one in encoded["validation"]["id"] if one] == ["a", "b", "c", "long"]


def test_no_room_for_the_context(tmp_path):
    with pytest.raises(
        ConfigError, match="--max_length 20 leaves no room.*--max_question_tokens 12, 3 special"
    ):
        loaded(tmp_path, max_length=20)


def test_built_in_data_end_to_end():
    task = QuestionAnswering(Settings(doc_stride=32, max_question_tokens=32))
    data = DataConfig(max_train_samples=32, max_eval_samples=8, max_predict_samples=8, max_length=128)
    raw = task.load(data, NO_MODEL)
    tokenizer = task.tokenizer(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    encoded, truncated = task.encode(raw, tokenizer, data)
    assert len(encoded["train"]) >= 32 and truncated == {"train": 0, "validation": 0, "test": 0}
    torch.manual_seed(0)
    model = task.auto_class.from_config(config)
    batch = task.collate([encoded["train"][at] for at in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(10):
        outputs = model(**batch)
        losses.append(outputs.loss.item())
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(np.log(batch["input_ids"].shape[1]), abs=0.7)
    assert losses[-1] < 0.8 * losses[0]
    assert task.score(sure(task, encoded["validation"]), encoded["validation"])["exact_match"] == 100
