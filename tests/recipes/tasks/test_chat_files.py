"""Conversations as people have them in files: parts, tools, reasoning, weights.

What is learned is decoded and compared with text that was written by hand for a template written by hand.
"""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from recipes import causal_lm
from tests import launch
from tests.recipes.seq2seq_runs import predictions, results, write

# A key that is null for `is defined` is one that Arrow filled in.
TEMPLATE = (
    "{%- if tools %}<|system|>tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|user|>got"
    "{% if m.name is defined %} from {{ m.name }}{% endif %}"
    "{% if m.tool_call_id is defined %} for {{ m.tool_call_id }}{% endif %}: {{ m.content }}<|end|>"
    "{%- else %}<|{{ m.role }}|>"
    "{%- if m.reasoning_content is defined %}think {{ m.reasoning_content }} done {% endif %}"
    "{%- if m.content is defined %}{{ m.content }}{% endif %}"
    "{%- if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endif %}<|end|>"
    "{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SUM = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "enum": [1, "one"]}}},
    },
}


def call(arguments, name="add", **more):
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


# Each with what is learned of it; the tokenizer puts a space behind a special token where there is none.
CHATS = {
    "strings": (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        " hello<|end|>",
    ),
    "parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi"}, {"type": "text", "value": " you"}],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "text": "greet"},
                        {"type": "text", "content": "hel"},
                        {"type": "text", "text": "lo"},
                    ],
                },
            ]
        },
        " think greet done hello<|end|>",
    ),
    "tools": (
        {
            "messages": [
                {"role": "user", "content": "add 1"},
                {
                    "role": "assistant",
                    "content": None,
                    "thinking": "a sum",
                    "tool_calls": [call('{"a": 1, "b": null}', id="c1")],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
                {"role": "assistant", "content": "it is 2"},
            ],
            "tools": [SUM],
        },
        ' think a sum done call add {"a": 1, "b": null}<|end|> it is 2<|end|>',
    ),
    "objects": (
        {
            "messages": [
                {"role": "user", "content": "add 0.5"},
                {"role": "assistant", "content": "now ", "tool_calls": [call({"a": 0.5, "to": ["x"]})]},
                {"role": "tool", "content": [{"type": "text", "text": "1.5"}]},
                {"role": "assistant", "content": "1.5", "weight": 1},
            ],
            "tools": json.dumps([SUM["function"]]),
        },
        ' now call add {"a": 0.5, "to": ["x"]}<|end|> 1.5<|end|>',
    ),
    "weights": (
        {
            "messages": [
                {"role": "user", "content": "hi", "weight": 0, "tool_calls": "[]"},
                {"role": "assistant", "content": "first", "weight": 0, "train": False},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": "second", "loss_weight": True, "weight": None},
                {"role": "user", "content": "more"},
                {"role": "assistant", "content": "third", "loss_weight": 0.0, "weight": False},
            ],
            "tools": [],
        },
        " second<|end|>",
    ),
}
HI = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "a"}
STREAM = {"max_steps": 6, "window": 8, "tokens_per_step": 512, "max_tokens_per_device": 512}
ROWS = [row for row, _ in CHATS.values()]
LEARNED = [text for _, text in CHATS.values()]


@pytest.fixture
def template(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return str(tmp_path / "chat.jinja")


@pytest.fixture
def build(tmp_path, template):
    """Builds the recipe on a file for training and validation."""

    def make(path, **settings):
        given = {"chat_template": template, "max_length": 256, "output_dir": str(tmp_path / "out")}
        files = {"train_file": str(path), "validation_file": str(path)}
        return causal_lm.build(**{**given, **files, **settings})

    return make


def learned(recipe, labels) -> str:
    return recipe.tokenizer.decode([label for label in labels if label != -100])


def all_learned(recipe, split="train") -> list[str]:
    return [learned(recipe, row["labels"]) for row in recipe.datasets[split]]


def streamed(recipe) -> set[str]:
    return {
        learned(recipe, row.tolist())
        for batch in recipe.trainer.get_train_dataloader()
        for row in batch["labels"]
    }


def whole(recipe, row) -> str:
    return recipe.tokenizer.decode(recipe.datasets["train"][row]["input_ids"])


@pytest.mark.parametrize("form", ["json", "jsonl", "jsonl.gz", "folder", "hub"])
def test_what_is_learned_of_mixed_conversations(form, build, tmp_path):
    """Lists and strings in one column, objects with other keys in each row, whole numbers and fractions."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    path = tmp_path / "data" / ("train.jsonl" if form in ("folder", "hub") else f"train.{form}")
    path.parent.mkdir()
    if form == "json":
        path.write_text(json.dumps(ROWS))
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    if form == "folder":
        # Another shard is in another format, has nothing but strings, and the same columns.
        table = pa.Table.from_pylist([{**ROWS[0], "tools": None}])
        pyarrow.parquet.write_table(table, path.parent / "train2.parquet")
    more = {"dataset_name": str(path.parent), "train_file": None} if form == "hub" else {}
    recipe = build(path.parent if form == "folder" else path, **more)
    assert all_learned(recipe) == LEARNED + LEARNED[:1] * (form == "folder")
    assert all_learned(recipe, "validation") == all_learned(recipe)
    # Nothing but what the rows hold is rendered, and the tools stand before.
    shown = " ".join(whole(recipe, 2).split())
    assert shown.startswith("<|system|> tools " + json.dumps(SUM))
    assert "<|user|> got from add for c1: 2<|end|>" in shown
    assert "<|user|> got: 1.5<|end|>" in whole(recipe, 3)
    assert "tools" not in whole(recipe, 0) + whole(recipe, 4)


def test_a_stream_gives_the_same(build, tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS)
    # Nothing is left of the last rows, and all of a chunk: none of it ends the run.
    silent = {"messages": [HI, {**ANSWER, "weight": 0}]}
    path = write(tmp_path / "train.jsonl", [*ROWS, *[silent] * 300])
    recipe = build(path, streaming=True, **STREAM)
    assert streamed(recipe) == set(LEARNED)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_fills_in_nulls_that_the_template_does_not_see(build, tmp_path, streaming):
    rows = [
        {"messages": [*CHATS["tools"][0]["messages"][:1], {"role": "assistant", "content": "no"}]},
        {
            "messages": [
                {"role": "user", "content": "add"},
                {"role": "assistant", "tool_calls": [call({"a": 1}, id="c1")]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "tool_calls": [call({"b": "x"})], "weight": 1.0},
                {"role": "assistant", "content": "never", "weight": 0.0},
            ]
        },
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    more = {"streaming": True, **STREAM} if streaming else {}
    recipe = build(tmp_path / "train.parquet", **more)
    expected = [" no<|end|>", ' call add {"a": 1}<|end|> call add {"b": "x"}<|end|>']
    assert all_learned(recipe, "validation") == expected
    if streaming:
        assert streamed(recipe) == set(expected)
    else:
        assert "got for c1: 2" in whole(recipe, 1)


def test_sharegpt_names_the_older_function_call_and_bare_tools(build, tmp_path):
    tool = {"name": "add", "parameters": json.dumps({"type": "object"})}
    share = [
        {"from": "human", "value": "add 1"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "it is 2"},
    ]
    older = [
        {"role": "user", "content": "add 1"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "content": {"sum": 2}},
        {"role": "assistant", "content": "it is 2"},
    ]
    rows = [{"conversations": share, "tools": [tool]}, {"conversations": older, "tools": json.dumps(tool)}]
    recipe = build(write(tmp_path / "train.jsonl", rows))
    assert all_learned(recipe) == [' call add {"a": 1}<|end|> it is 2<|end|>'] * 2
    shown = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
    for row, result in enumerate(["got: 2", 'got: {"sum": 2}']):
        text = whole(recipe, row)
        assert json.loads(text[len("<|system|> tools ") : text.index("<|end|>")]) == json.loads(shown)
        assert result in text


def test_conversations_as_json_text_in_a_table_and_named_columns(build, tmp_path):
    cells = [[json.dumps(row["messages"]), json.dumps(row.get("tools"))] for row in ROWS[:4]]
    quoted = ['"{}","{}"'.format(*(cell.replace('"', '""') for cell in row)) for row in cells]
    (tmp_path / "train.csv").write_text("\n".join(["chat,given", *quoted]))
    recipe = build(tmp_path / "train.csv", messages_column="chat", tools_column="given")
    assert all_learned(recipe) == LEARNED[:4]
    nested = [{"data": {"chat": row["messages"], "given": row.get("tools")}} for row in ROWS]
    path = write(tmp_path / "nested.jsonl", nested)
    recipe = build(
        path, messages_column="data.chat", tools_column="data.given", output_dir=str(tmp_path / "b")
    )
    assert all_learned(recipe) == LEARNED


def test_conversations_without_any_weight_are_left_out_and_counted(build, tmp_path, caplog):
    silent = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    }
    path = write(tmp_path / "train.jsonl", [silent, ROWS[0], silent])
    with caplog.at_level("INFO", logger="hf_dist"):
        recipe = build(path)
    assert all_learned(recipe) == LEARNED[:1]
    assert "train: 2 of 3 conversations have weight 0 in every answer and are left out" in caplog.text


def test_an_assistant_who_speaks_first_is_learned_without_what_stands_before(build, tmp_path):
    turns = [{"role": "assistant", "content": "welcome"}, {"role": "user", "content": "hi"}]
    recipe = build(write(tmp_path / "train.jsonl", [{"messages": turns, "tools": [SUM]}] * 2))
    assert all_learned(recipe) == [" welcome<|end|>"] * 2


def test_a_template_that_opens_the_last_turn_otherwise(build, tmp_path):
    """As public ones do, which put empty thinking into the last turn only: each answer as it is rendered."""
    path = tmp_path / "last.jinja"
    path.write_text(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and loop.last %}think done {% endif %}{{ m.content }}"
        "{% for c in m.tool_calls %}call {{ c.function.name }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call({})]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": " hello "},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "good bye"},
    ]
    recipe = build(write(tmp_path / "train.jsonl", [{"messages": turns}] * 2), chat_template=str(path))
    assert all_learned(recipe)[0] == " call add<|end|> hello <|end|> think done good bye<|end|>"


@pytest.mark.parametrize(
    ("turns", "more", "says"),
    [
        ([HI, {**ANSWER, "weight": 0.5}], {}, "row 2 (counted from 1): a turn has weight 0.5; expected 0"),
        ([HI, {**ANSWER, "loss_weight": "0"}], {}, "loss_weight '0'"),
        ([HI, {**ANSWER, "weight": 1, "loss_weight": 0}], {}, "weight 1 and loss_weight 0, which contradict"),
        ([{**HI, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER], {},
         "row 2 (counted from 1): a turn's content has a part of type image_url"),
        ([HI, {"role": "assistant", "content": None}], {}, "expected text under role and content"),
        ([HI, {"role": "assistant", "tool_calls": [call("no json")]}], {}, "'no json' is no JSON"),
        ([HI, {"role": "assistant", "tool_calls": [call("[1]")]}], {}, "the arguments of add are [1]"),
        ([HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}], {}, "the tool call {'id': 'a'}"),
        ([HI, ANSWER], {"tools": [{"type": "search"}]}, "column tools of the train data, row 2"),
        ([HI, ANSWER], {"tools": "[{]"}, "column tools of the train data, row 2"),
        ([HI, {**ANSWER, "thinking": "a", "reasoning_content": "b"}], {}, "different reasoning under"),
        ("abc", {}, "which is no JSON"),
        ([HI, {"role": "oracle", "content": "a"}, ANSWER], {}, "row 2 (counted from 1): the chat template"),
    ],
)  # fmt: skip
def test_faults_name_the_row(turns, more, says, template, tmp_path, monkeypatch, capsys):
    (tmp_path / "chat.jinja").write_text(
        TEMPLATE
        + "{% for m in messages if m.role == 'oracle' %}{{ raise_exception('no oracles') }}{% endfor %}"
    )
    path = write(tmp_path / "train.jsonl", [ROWS[0], {"messages": turns, **more}])
    monkeypatch.chdir(tmp_path)
    flags = (f"--train_file={path}", f"--validation_file={path}", f"--chat_template={template}")
    assert launch.call(causal_lm.main, *flags, "--output_dir=out") != 0
    assert says in launch.only_error(capsys.readouterr().err)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [HI, ANSWER], "tools": [SUM]}, "row 2 (counted from 1) has tools, and"),
        ({"messages": [HI, {**ANSWER, "tool_calls": [call({})]}]}, "row 2 (counted from 1) has tool_calls"),
        ({"messages": [HI, {**ANSWER, "thinking": "b"}]}, "row 2 (counted from 1) has reasoning"),
    ],
)  # fmt: skip
def test_what_a_template_would_lose_is_refused(row, says, tmp_path, monkeypatch, capsys):
    """The built-in template knows roles and contents only."""
    path = write(tmp_path / "train.jsonl", [ROWS[0], row])
    monkeypatch.chdir(tmp_path)
    assert launch.call(causal_lm.main, f"--train_file={path}", f"--validation_file={path}") != 0
    error = launch.only_error(capsys.readouterr().err)
    assert says in error and "--chat_template" in error


def test_nothing_but_weight_0_is_an_error(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "train.jsonl", [{"messages": [HI, {**ANSWER, "weight": 0}]}] * 3)
    monkeypatch.chdir(tmp_path)
    assert launch.call(causal_lm.main, f"--train_file={path}") != 0
    assert "every answer of the train data has weight 0" in launch.only_error(capsys.readouterr().err)


def test_the_turn_behind_a_result_is_answered(build, template, tmp_path):
    """The prompt of --do_predict has the tools and ends where the assistant is to speak."""
    train = write(tmp_path / "train.jsonl", ROWS)
    row = CHATS["tools"][0]
    test = write(tmp_path / "test.jsonl", [row, {**row, "messages": row["messages"][:3]}, ROWS[0]])
    recipe = build(train, test_file=test, do_train=True, do_predict=True)
    first, second, third = (recipe.tokenizer.decode(one["input_ids"]) for one in recipe.datasets["test"])
    assert first == second and first.startswith("<|system|> tools")
    assert first.endswith("<|user|> got from add for c1: 2<|end|><|assistant|>")
    assert third == "<|user|> hi<|end|><|assistant|>"
    flags = (
        f"--train_file={train}",
        f"--validation_file={train}",
        f"--chat_template={template}",
        "--max_steps=1",
    )
    found = (f"--test_file={test}", "--do_train", "--do_predict", "--max_new_tokens=2", "--save_strategy=no")
    results(causal_lm.main, *flags, *found, output_dir=tmp_path / "run")
    assert [line["row"] for line in predictions(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.slow
def test_two_processes_train_on_it_as_one(template, tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS * 8)
    flags = (
        *(f"--train_file={path}", f"--validation_file={path}", f"--chat_template={template}"),
        *("--max_steps=3", "--tokens_per_step=1024", "--max_tokens_per_device=512", "--logging_steps=1"),
        *("--save_strategy=no", "--eval_strategy=no"),
    )
    losses = {}
    for nproc in (1, 2):
        launch.run("causal_lm", *flags, output_dir=tmp_path / str(nproc), nproc=nproc)
        losses[nproc] = launch.losses(tmp_path / str(nproc))
    assert len(losses[1]) == 3 and losses[2] == pytest.approx(losses[1], rel=1e-4)
