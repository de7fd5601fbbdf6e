"""Training from a stream, as a user starts it: no length, an exact resume, clear refusals."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest
from safetensors.torch import load_file

from recipes import causal_lm, text_classification
from tests.launch import call, run

SMALL = (
    "--streaming",
    "--max_steps=6",
    "--window=40",
    "--max_length=32",
    "--max_tokens_per_device=256",
    "--tokens_per_step=512",
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    (folder / "train").mkdir()
    for number in range(2):
        lines = [f"line {number} {at} " + "word " * (at % 12) for at in range(80)]
        with gzip.open(folder / "train" / f"{number}.txt.gz", "wt") as file:
            file.write("\n".join(lines))
    (folder / "dev.txt").write_text("a line\nanother line\n")
    return f"--train_file={folder / 'train'}", f"--validation_file={folder / 'dev.txt'}"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_stream_goes_on_where_it_was(shards, tmp_path):
    flags = (*SMALL, *shards, "--save_strategy=steps", "--save_steps=2", "--save_total_limit=9")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert call(causal_lm.main, *flags, f"--output_dir={whole}", f"--dump_batches={tmp_path}/1.jsonl") == 0
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
    # What a killed run had already written, one step more than it saved.
    written = (tmp_path / "1.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "2.jsonl").write_text("".join(written[:10]))
    assert call(causal_lm.main, *flags, f"--output_dir={resumed}", f"--dump_batches={tmp_path}/2.jsonl") == 0
    weights, same = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert weights.keys() == same.keys() and all((weights[name] == same[name]).all() for name in weights)
    trained = lines(tmp_path / "1.jsonl")
    assert trained == lines(tmp_path / "2.jsonl")
    assert [batch["step"] for batch in trained] == [step for step in range(6) for _ in range(2)]
    rows = [row for batch in trained for row in batch["rows"]]
    assert len(rows) == len(set(rows)) and all(batch["computed_tokens"] <= 256 for batch in trained)


def test_labels_of_a_stream_are_those_of_its_first_rows(tmp_path):
    rows = [{"text": f"row {at}", "label": "ab"[at % 2]} for at in range(60)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (*SMALL, f"--train_file={path}", f"--validation_file={path}", "--save_strategy=no")
    assert call(text_classification.main, *flags, f"--output_dir={tmp_path}/out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b"}


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--max_steps=-1",), "needs --max_steps"),
        (("--batching=examples",), "--batching examples"),
        (("--dataloader_num_workers=1",), "--dataloader_num_workers"),
        (("--packing",), "--packing"),
    ],
)
def test_what_a_stream_cannot_do(shards, tmp_path, capsys, flags, says):
    assert call(causal_lm.main, *SMALL, *shards, *flags, f"--output_dir={tmp_path}/out") == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and says in error[0]
    assert not (tmp_path / "out").exists()


def test_a_stream_without_validation_rows_says_so(shards, tmp_path, capsys):
    assert call(causal_lm.main, *SMALL, shards[0], f"--output_dir={tmp_path}/out") == 2
    assert "--validation_file" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_a_stream(shards, tmp_path):
    flags = (*SMALL, *shards, "--save_strategy=no", f"--dump_batches={tmp_path}/dump.jsonl")
    results = run("causal_lm", *flags, output_dir=tmp_path / "out", nproc=2)
    assert results["world_size"] == 2
    batches = lines(tmp_path / "dump.jsonl")
    assert [(batch["step"], batch["rank"]) for batch in batches] == [(s, r) for s in range(6) for r in (0, 1)]
