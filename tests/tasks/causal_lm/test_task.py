"""Text, prompts and conversations: what is learned, what is padded, what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaForCausalLM

from hf_dist.config import BatchingConfig, DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.causal_lm.task import CausalLM, CausalLMSettings
from hf_dist.tasks.items import TokenItems
from hf_dist.training.steps.loss import count_items

NO_MODEL = ModelConfig()
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "good bye"},
]


@pytest.fixture
def prepare(tmp_path):
    """Rows -> the task after `encode`, the encoded splits and how many were cut."""

    def make(rows, *, test=None, model=NO_MODEL, length=64, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"train_file": str(path), "validation_file": str(path)}
        if test is not None:
            (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
            files["test_file"] = str(tmp_path / "test.jsonl")
        data = DataConfig(max_length=length, **files)
        task = CausalLM(CausalLMSettings(**settings))
        raw = task.load(data, model)
        tokenizer = task.tokenizer(data, model)
        task.model_config(tokenizer, model)
        encoded, truncated = task.encode(raw, tokenizer, data)
        return task, tokenizer, encoded, truncated

    return make


def learned(tokenizer, row) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_every_token_of_a_text_but_its_first_is_predicted_once(prepare):
    text = "one two three four five six seven eight nine ten eleven twelve"
    task, tokenizer, encoded, _ = prepare([{"text": text}, {"text": "short"}], length=256, block_size=5)
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    pieces = encoded["train"]["input_ids"][:]
    long = [piece for piece in pieces if piece[0] != tokenizer("short")["input_ids"][0]]
    assert max(map(len, pieces)) == 5
    targets = [token for piece in long for token in piece[1:]]
    assert targets == tokens[1:]
    batch = task.collate([encoded["train"][at] for at in range(len(pieces))])
    assert count_items(TokenItems(shift=True), batch) == sum(len(piece) - 1 for piece in pieces)


def test_a_prompt_is_not_learned_and_the_end_is(prepare):
    rows = [{"prompt": "add one to 3", "completion": "it is 4"}]
    _, tokenizer, encoded, _ = prepare(rows)
    row = encoded["train"][0]
    prompt = tokenizer("add one to 3")["input_ids"]
    assert row["input_ids"][: len(prompt)] == prompt
    assert row["labels"][: len(prompt)] == [-100] * len(prompt)
    assert learned(tokenizer, row) == " it is 4<|end|>"


def test_instruction_input_output_and_paths(prepare):
    rows = [{"instruction": "say", "instances": [{"input": "dog", "output": "woof"}]}]
    _, tokenizer, encoded, _ = prepare(
        rows, prompt_column="instruction", input_column="instances.0.input",
        completion_column="instances.0.output",
    )  # fmt: skip
    assert tokenizer.decode(encoded["train"][0]["input_ids"]) == " say\n\ndog woof<|end|>"
    _, tokenizer, encoded, _ = prepare([{"instruction": "say", "input": "", "output": "woof"}])
    assert tokenizer.decode(encoded["train"][0]["input_ids"]) == " say woof<|end|>"


def test_only_the_turns_of_the_assistant_are_learned(prepare):
    _, tokenizer, encoded, _ = prepare([{"messages": TURNS}])
    row = encoded["train"][0]
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert row["input_ids"] == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert learned(tokenizer, row) == " hello there<|end|> good bye<|end|>"


def test_sharegpt_names_are_the_same_conversation(prepare):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    other = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    _, _, encoded, _ = prepare([{"messages": TURNS}])
    _, _, same, _ = prepare([{"conversations": other}])
    assert same["train"][0] == encoded["train"][0]


def test_a_template_of_ones_own_and_its_layout(prepare, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    _, tokenizer, encoded, _ = prepare([{"messages": TURNS[1:3]}], chat_template=str(path))
    assert learned(tokenizer, encoded["train"][0]).split() == ["hello", "there</s>"]
    assert tokenizer.chat_template == path.read_text()


def test_a_template_that_rewrites_earlier_turns_is_refused(prepare, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else 'x' }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ConfigError, match="renders earlier turns otherwise"):
        prepare([{"messages": TURNS}], chat_template=str(path))


@pytest.mark.parametrize("form", ["prompt", "chat"])
def test_padding_with_the_end_token_leaves_it_learned(prepare, tmp_path, form):
    tokenizer = small_models.causal_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    saved = json.loads(path.read_text())
    del saved["pad_token"]
    path.write_text(json.dumps(saved))
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=64)
    config.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "say a", "completion": "b"}, {"prompt": "say", "completion": "c d e f"}]
    if form == "chat":
        rows = [{"messages": TURNS[1:3]}, {"messages": TURNS}]
    task, tokenizer, encoded, _ = prepare(rows, model=ModelConfig(model_name_or_path=str(tmp_path / "model")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    short, long = sorted((encoded["train"][at] for at in range(2)), key=lambda row: len(row["labels"]))
    batch = task.collate([short, long])
    length = len(short["input_ids"])
    assert batch["labels"][0, length - 1] == tokenizer.eos_token_id
    assert (batch["labels"][0, length:] == -100).all() and (batch["input_ids"][0, length:] == 1).all()
    assert batch["attention_mask"][0].tolist() == [1] * length + [0] * (len(long["input_ids"]) - length)


def test_rows_that_lose_their_answer_are_dropped_and_counted(prepare, caplog):
    rows = [{"prompt": "word " * 30, "completion": "x"}, {"prompt": "a", "completion": "word " * 30}]
    with caplog.at_level("WARNING", logger="hf_dist"):
        _, _, encoded, truncated = prepare(rows, length=16)
    assert len(encoded["train"]) == 1 and truncated["train"] == 1
    assert "1 of 2 examples have no answer left within --max_length 16" in caplog.text
    with pytest.raises(DataError, match="no row of the train data has a token to learn"):
        prepare(rows[:1], length=16)


@pytest.mark.parametrize(
    "rows, settings, says",
    [
        ([{"messages": TURNS[:2]}], {}, "no answer of the assistant in row 1"),
        ([{"messages": []}], {}, r"row 1 .*found \[\]; expected a list of turns"),
        ([{"messages": [{"role": "user"}]}], {}, "row 1.*expected text under role and content"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": " "}], {}, "no answer in row 2"),
        ([{"prompt": "a", "completion": None}], {}, "completion.*row 1.*None; expected text"),
        ([{"foo": "a"}], {}, "--prompt_column and --completion_column, or --messages_column"),
        ([{"text": "a"}], {"text_column": "txt"}, r"no column txt \(did you mean text\?\)"),
        ([{"text": " "}], {}, "blank in every row"),
        ([{"text": "a", "answer": [{"x": 1}]}], {"prompt_column": "text", "completion_column": "answer.1.x"},
         "answer.1.x of the train data leads nowhere in row 1"),
    ],
)  # fmt: skip
def test_faults(prepare, rows, settings, says):
    with pytest.raises(DataError, match=says):
        prepare(rows, **settings)


def test_a_tokenizer_without_template_says_so(prepare, tmp_path):
    tokenizer = small_models.causal_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="--chat_template"):
        prepare([{"messages": TURNS}], model=ModelConfig(tokenizer_name=str(tmp_path / "plain")))


def test_blank_texts_are_left_out(prepare, caplog):
    with caplog.at_level("INFO", logger="hf_dist"):
        _, _, encoded, _ = prepare([{"text": "a b c"}, {"text": "  "}])
    assert len(encoded["train"]) == 1 and "1 blank texts are left out" in caplog.text


def test_scores_are_those_of_a_plain_loop(prepare):
    task, _, encoded, _ = prepare([{"text": "a b c d e"}, {"text": "f g"}, {"text": "a a a"}])
    torch.manual_seed(0)
    model = LlamaForCausalLM(task.builtin_config(task._tokenizer)).eval()
    rows = [encoded["validation"][at] for at in range(3)]
    batch = task.collate(rows)
    with torch.no_grad():
        predictions = task.predict(model(**batch), batch)
    found = task.score(predictions, encoded["validation"])
    losses, right, frequency = [], 0, []
    counts = np.bincount(np.concatenate([row["input_ids"] for row in rows]), minlength=len(task._tokenizer))
    shares = (counts + 1) / (counts + 1).sum()
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            logs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        losses += [-logs[at, ids[at + 1]].item() for at in range(len(ids) - 1)]
        right += sum(int(logs[at].argmax() == ids[at + 1]) for at in range(len(ids) - 1))
        frequency += [-math.log(shares[token]) for token in row["input_ids"][1:]]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert found["token_accuracy"] == right / len(losses)
    assert found["perplexity_baseline"] == pytest.approx(math.exp(np.mean(frequency)), rel=1e-9)


def test_packs_fill_a_whole_fraction_of_the_cap(prepare):
    rows = [{"text": f"word {'x ' * (number % 9)}"} for number in range(60)]
    task, _, encoded, _ = prepare(rows, length=30, packing=True)
    packs = task.pack(encoded["train"], BatchingConfig(max_tokens_per_device=100), seed=0)
    assert packs.packing.capacity == 33  # 100 holds three rows of 30 or more
    assert packs.lengths.sum() == sum(map(len, encoded["train"]["input_ids"]))
    assert CausalLM().pack(encoded["train"], BatchingConfig(), seed=0) is None


def test_prompts_to_predict_are_padded_on_the_left_and_answered(prepare):
    rows = [{"prompt": "say a", "completion": "b"}, {"prompt": "say", "completion": "c d"}]
    test = [{"prompt": "say a b c d"}, {"prompt": "say"}]
    task, tokenizer, encoded, _ = prepare(rows, test=test, max_new_tokens=4)
    assert "labels" not in encoded["test"].column_names
    batch = task.collate([encoded["test"][at] for at in range(2)])
    ids = encoded["test"]["input_ids"][1]
    assert batch["input_ids"][1, -len(ids) :].tolist() == ids
    assert batch["attention_mask"][1].flip(0).tolist() == [1] * len(ids) + [0] * (
        len(batch["input_ids"][1]) - len(ids)
    )
    assert task.generates(batch)
    torch.manual_seed(0)
    model = LlamaForCausalLM(task.builtin_config(tokenizer)).eval()
    together = task.generate(model, batch, synced=False)
    alone = [task.generate(model, task.collate([encoded["test"][at]]), synced=False)[0] for at in range(2)]
    assert together == alone
    assert list(task.records(together, encoded["test"])) == [{"prediction": text} for text in together]
