"""Files whose ending says nothing: what is told by their contents, and what is not guessed."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from hf_dist.config import DataConfig
from hf_dist.data.loading.sources import load_splits
from hf_dist.data.loading.streams import load_stream
from hf_dist.data.readers import sniffing
from hf_dist.data.readers.files import endings, formats, load_file
from hf_dist.errors import ConfigError, DataError
from hf_dist.training.flags.parsing import parse

ROWS = [{"text": f'he said "{n}",\nand left', "label": "ab"[n % 2]} for n in range(5)]
CONLL_2003 = (
    "-DOCSTART- -X- -X- O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\nPeter NNP I-NP I-PER\n\n"
    "-DOCSTART- -X- -X- O\n\nBonn NNP I-NP I-LOC\n"
)
ENTITIES = "Oslo\tB-LOC\nis\tO\n\nAnn\tB-PER\nLee\tI-PER\n"
PARTS_OF_SPEECH = "Oslo NNP\nis VBZ\n. .\n\nAnn NNP\nis VBZ\n, ,\n\nit PRP\nis VBZ\n. .\n\n" * 3
COMMENTED = "# newdoc id = a\n# text = Oslo is\nOslo _ _ B-LOC\nis _ _ O\n\n# sent_id = 2\nAnn _ _ B-PER\n"


def table(delimiter: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["text", "label"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue()


TEXTS = {
    "conll": [CONLL_2003, ENTITIES, PARTS_OF_SPEECH, COMMENTED, "Oslo B-LOC\n", ENTITIES * 20],
    "csv": [table(","), table(",") + "x,y\n" * 9, "a,b c\n1,2\n3,4\n", ",text,label\n0,x y,1\n"],
    "tsv": [table("\t"), "sentence\tlabel\ngood\t1\n", "q\ta\nwho is it\tAnn\nwhere\tin Oslo\n"],
    "jsonl": ["\n".join(map(json.dumps, ROWS)), "\n" + "\n".join(map(json.dumps, ROWS * 9))],
    "json": [json.dumps(ROWS), json.dumps({"data": ROWS}, indent=1), '{"a": 1}'],
}


def splits(path, **other) -> DatasetDict:
    return load_splits(DataConfig(train_file=str(path), **other), DatasetDict)


@pytest.mark.parametrize(("form", "content"), [(form, text) for form in TEXTS for text in TEXTS[form]])
def test_what_is_told_by_contents_is_what_the_ending_would_have_said(tmp_path, caplog, form, content):
    """Also with a byte order mark and Windows line ends, and packed."""
    named = tmp_path / f"rows.{form}"
    named.write_text(content, newline="")
    wanted = list(load_file(named))
    assert wanted
    marked = b"\xef\xbb\xbf" + content.encode()
    if form in ("conll", "jsonl"):
        marked = marked.replace(b"\n", b"\r\n")
    (tmp_path / "plain.train").write_bytes(marked)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(marked, 1))
    for name in ("plain.train", "packed.gz"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert list(splits(tmp_path / name)["train"]) == wanted
        told = [record.message for record in caplog.records if "by the contents" in record.message]
        assert told == [f"{tmp_path / name}: read as {form}, by the contents (--file_format overrules that)"]


@pytest.mark.parametrize("form", sorted(TEXTS))
def test_a_head_that_ends_anywhere_tells_the_same(tmp_path, monkeypatch, form):
    content = (TEXTS[form][0] * (1 if form == "json" else 9)).encode()
    (tmp_path / "rows").write_bytes(content)
    # From the end of the second row on.
    for size in range(len(TEXTS[form][0].encode()) * 2 // 3, len(content) + 2):
        monkeypatch.setattr(sniffing, "_HEAD", size)
        assert sniffing.sniff(tmp_path / "rows") == form, size


def test_the_conll_2003_layout(tmp_path):
    (tmp_path / "eng.train").write_text(CONLL_2003)
    assert list(splits(tmp_path / "eng.train")["train"]) == [
        {"tokens": ["EU", "rejects"], "tags": ["I-ORG", "O"]},
        {"tokens": ["Peter"], "tags": ["I-PER"]},
        {"tokens": ["Bonn"], "tags": ["I-LOC"]},
    ]


def test_columns_are_told_by_their_marks(tmp_path):
    rows = pa.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(rows, tmp_path / "a")
    for name, new in (("b", pa.ipc.new_file), ("c", pa.ipc.new_stream)):
        with new(str(tmp_path / name), rows.schema) as writer:
            writer.write_table(rows)
    for name in "abc":
        assert list(load_file(tmp_path / name)) == ROWS
    (tmp_path / "a.gz").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    with pytest.raises(DataError, match="parquet files are packed inside; unpack it"):
        load_file(tmp_path / "a.gz")


@pytest.mark.parametrize(
    "content",
    [
        "Just a line.\n",
        "One, two.\nThree, four.\n",
        "Hello, world\nGood, day\nBye, all\n",
        "text\na\nb\n",
        "Oslo\nis\n\nAnn\n",
        "good morning\ngood night\n\nwell done\nwell then\n",
        # Tags of one sentence, or a table of two columns without a header?
        "Oslo\tNNP\nis\tVBZ\nold\tJJ\n",
        "a;b\n1;2\n",
    ],
)
def test_what_could_be_several_things_is_not_guessed(tmp_path, content):
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(DataError, match=r"data: neither its ending \(none\) nor its .*--file_format conll\|"):
        load_file(path)
    assert load_file(path, "txt")["text"][:] == [line for line in content.splitlines() if line]


@pytest.mark.parametrize(
    "content, wanted",
    [
        ("text,label\nx,y\n".encode("utf-16"), "data is UTF-16 .its byte order mark"),
        ("text,label\nx,y\n".encode("utf-16-le"), "data is UTF-16 or no text"),
        ("a O\n".encode("utf-16-be"), "data is UTF-16 or no text"),
        ("text,label\nx\xe9,y\n".encode("latin-1"), "data, line 2 is not UTF-8: byte 12"),
        (b"PK\x03\x04\x14\x00\x06\x00\x08\x00", "data is no text, and no parquet"),
        (gzip.compress(b"text,label\nx,y\n"), "data is packed by gzip; .* in .gz"),
        (pa.compress(b"text,label\nx,y\n", codec="zstd", asbytes=True), "data is packed by zstd; .* .zst"),
        (b" \n\n", "data has no rows"),
    ],
)
def test_what_is_no_text(tmp_path, content, wanted):
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(DataError, match=wanted):
        load_file(tmp_path / "data")


def test_utf_16_without_a_mark_is_seen_whatever_the_ending(tmp_path):
    for name in ("a.csv", "a.conll", "a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes("text,label\n".encode("utf-16-le"))
        with pytest.raises(DataError, match="UTF-16 or no text"):
            load_file(tmp_path / name)


def test_a_fault_in_a_file_that_is_told_by_contents_has_its_line(tmp_path):
    (tmp_path / "a").write_text("Oslo B-LOC\nis O\n\n" * 9 + "here\n")
    with pytest.raises(DataError, match=r"a, line 28: 1 column\(s\) where line 1 has 2"):
        load_file(tmp_path / "a")
    (tmp_path / "b").write_text("text,label\n" + "x,y\n" * 20 + 'x,"y" z\n')
    with pytest.raises(DataError, match="b, line 22"):
        load_file(tmp_path / "b")


def test_the_flag_overrules_endings_in_all_splits_and_is_part_of_the_cache(tmp_path):
    (tmp_path / "a.txt").write_text("Oslo B-LOC\nis O\n")
    (tmp_path / "b.csv").write_text("Ann B-PER\n")
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"it O\n"))
    assert splits(tmp_path / "a.txt")["train"]["text"][:] == ["Oslo B-LOC", "is O"]
    found = splits(
        tmp_path / "a.txt",
        validation_file=str(tmp_path / "b.csv"),
        test_file=str(tmp_path / "c.gz"),
        file_format="conll",
    )
    assert {split: rows["tokens"][:] for split, rows in found.items()} == {
        "train": [["Oslo", "is"]],
        "validation": [["Ann"]],
        "test": [["it"]],
    }
    assert splits(tmp_path / "a.txt")["train"]["text"][:] == ["Oslo B-LOC", "is O"]


def test_folders_and_patterns_of_files_without_an_ending(tmp_path, caplog):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        (folder / f"part-{number}").write_text(
            "".join(json.dumps({"text": f"{number}"}) + "\n" for _ in "ab")
        )
    (folder / "README").write_text("what this is")
    (folder / "notes.md").write_text("what this is")
    (folder / "_SUCCESS").write_text("")
    (folder / ".crc").write_text("x")
    with caplog.at_level(logging.INFO):
        assert splits(folder)["train"]["text"][:] == ["0", "0", "1", "1", "2", "2"]
    assert f"{folder / 'part-0'} and 2 more files: read as jsonl" in caplog.text
    assert "3 files are read, and .crc, README, _SUCCESS, notes.md left out" in caplog.text
    assert splits(folder / "[_Rp]*", file_format="jsonl")["train"].num_rows == 6
    (folder / "notes.md").unlink()
    assert len(splits(folder, file_format="txt")["train"]) == 6
    # A known ending goes before contents.
    (folder / "a.txt").write_text("one\n")
    assert splits(folder)["train"]["text"][:] == ["one"]
    (folder / "a.txt").unlink()
    (folder / "part-4").write_text("prose\n")
    with pytest.raises(DataError, match="part-4: neither its ending"):
        splits(folder)


def test_files_of_several_splits_in_a_folder_are_seen_by_their_endings_too(tmp_path):
    for name in ("eng.train", "eng.testa", "eng.testb"):
        (tmp_path / name).write_text(CONLL_2003)
    for other in ({}, {"file_format": "conll"}):
        with pytest.raises(DataError, match=r"several splits \(eng.testa, eng.testb, eng.train\)"):
            splits(tmp_path, **other)


def test_a_format_without_files_is_refused(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for data in (
        DataConfig(file_format="csv"),
        DataConfig(file_format="csv", train_file=str(tmp_path / "saved")),
    ):
        with pytest.raises(
            DataError, match="--file_format csv says what local files hold, and none is given"
        ):
            load_splits(data, DatasetDict)


@pytest.mark.parametrize("form", sorted(TEXTS))
def test_streams_read_the_same(tmp_path, form):
    paths = [tmp_path / name for name in ("one", "two.odd")]
    for path in paths:
        path.write_text(TEXTS[form][0], newline="")
    wanted = [row for path in paths for row in load_file(path)]
    (tmp_path / "none.xyz").write_text("prose\n")
    for other in ({}, {"file_format": form}):
        stream, _ = load_stream(
            DataConfig(train_file=f"{tmp_path}/*o*[!z]", streaming=True, **other), DatasetDict
        )
        assert list(stream) == wanted
    with pytest.raises(DataError, match="none.xyz: neither"):
        load_stream(DataConfig(train_file=f"{tmp_path}/*", streaming=True), DatasetDict)


def test_every_format_has_an_ending_and_a_flag(tmp_path):
    assert {form.name for form in endings().values()} == set(formats())
    for name in formats():
        assert parse(["--file_format", name], recipe="recipe").data.file_format == name
    with pytest.raises(ConfigError, match="invalid choice: 'cvs' .*csv"):
        parse(["--file_format=cvs"], recipe="recipe")
    # From Python no parser looks at it.
    (tmp_path / "a.csv").write_text(TEXTS["csv"][0], newline="")
    with pytest.raises(
        DataError, match=r"--file_format cvs: .*\(did you mean csv\?\); expected one of conll, "
    ):
        load_splits(DataConfig(train_file=str(tmp_path / "a.csv"), file_format="cvs"), DatasetDict)
