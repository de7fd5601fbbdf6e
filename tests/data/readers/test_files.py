"""Local files: what is read, and where each fault is said to be."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from hf_dist.data.readers import tables
from hf_dist.data.readers.files import load_file
from hf_dist.errors import DataError

ROWS = [{"text": "good, and\nlong", "label": "pos"}, {"text": 'a "bad" one', "label": "neg"}]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def pack(content: bytes, archive: str) -> bytes:
    if archive.lower() == ".gz":
        return gzip.compress(content)
    return pa.compress(content, codec="zstd", asbytes=True)


def fault(path: str) -> str:
    with pytest.raises(DataError) as caught:
        load_file(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("delimiter, suffix", [(",", "csv"), ("\t", "tsv")])
def test_csv_as_the_standard_library_writes_it(tmp_path, delimiter, suffix):
    path = tmp_path / f"rows.{suffix}"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    assert list(load_file(str(path))) == ROWS


def test_json_lines_a_list_and_an_object_with_data(tmp_path):
    lines = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
    assert list(load_file(write(tmp_path / "a.jsonl", lines))) == ROWS
    assert list(load_file(write(tmp_path / "b.json", lines))) == ROWS
    assert list(load_file(write(tmp_path / "c.json", json.dumps(ROWS)))) == ROWS
    assert list(load_file(write(tmp_path / "d.json", json.dumps(ROWS, indent=2)))) == ROWS
    assert list(load_file(write(tmp_path / "e.json", json.dumps({"data": ROWS})))) == ROWS
    assert list(load_file(write(tmp_path / "f.json", json.dumps({"data": ROWS}, indent=1)))) == ROWS


def test_parquet(tmp_path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert list(load_file(str(tmp_path / "rows.parquet"))) == ROWS


def test_arrow_of_both_forms_keeps_class_labels(tmp_path):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    rows.save_to_disk(tmp_path / "saved")
    table = pa.ipc.open_stream(tmp_path / "saved" / "data-00000-of-00001.arrow").read_all()
    for name, new in (("a.arrow", pa.ipc.new_stream), ("b.arrow", pa.ipc.new_file)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
        loaded = load_file(str(tmp_path / name))
        assert list(loaded) == list(rows) and loaded.features == features


def test_text_is_one_row_a_line_that_is_not_blank(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\r\n\n  two \u2028 three\n \t\n\rlast".encode())
    assert load_file(path)["text"][:] == ["one", "  two \u2028 three", "last"]


TEXTS = {
    "a.csv": "text,label\na,x\n",
    "a.tsv": "text\tlabel\na\tx\n",
    "a.json": '[{"text": "a", "label": "x"}]',
    "a.jsonl": '{"text": "a", "label": "x"}\n',
    "a.txt": "a\nb\n",
    "a.conll": "a O\nb B-x\n",
    "a.bio": "a O\nb B-x\n",
    "a.iob": "a O\nb B-x\n",
    "a.iob2": "a O\nb B-x\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_packed_files_give_what_plain_ones_do(tmp_path, name):
    plain = list(load_file(write(tmp_path / name, TEXTS[name])))
    assert plain
    for archive in (".gz", ".zst", ".GZ"):
        path = write(tmp_path / (name + archive), pack(TEXTS[name].encode(), archive))
        assert list(load_file(path)) == plain


def test_an_archive_of_several_members_and_many_lines(tmp_path):
    parts = ["".join(f'{{"id": {row}}}\n' for row in range(at, at + 40_000)).encode() for at in (0, 40_000)]
    for archive in (".gz", ".zst"):
        path = write(tmp_path / f"a.jsonl{archive}", b"".join(pack(part, archive) for part in parts))
        assert load_file(path)["id"][:] == list(range(80_000))


@pytest.mark.parametrize("archive, kind", [(".gz", "gzip"), (".zst", "zstd")])
def test_faults_in_an_archive(tmp_path, archive, kind):
    def packed(name: str, content: bytes) -> str:
        return fault(write(tmp_path / (name + archive), pack(content, archive)))

    assert "line 3: 1 cells" in packed("a.csv", b"text,label\na,x\nb\n")
    assert "line 2: broken JSON" in packed("a.jsonl", b'{"a": 1}\n{"a": \n')
    assert "line 2 is not UTF-8: byte 6 (from 0) is 0xe9" in packed("a.txt", "texte\né".encode("latin-1"))
    assert "line 3: column a holds a string" in packed("b.jsonl", b'{"a": 1}\n\n{"a": "x"}\n')
    assert "has no rows" in packed("b.txt", b"\n")
    assert "has no rows" in packed("c.txt", b"")
    whole = pack(os.urandom(5_000).hex().encode(), archive)
    broken = {"torn": whole[: len(whole) // 2], "plain": b"a\nb\n", "more": whole + b"x" * 99}
    for name, content in broken.items():
        message = fault(write(tmp_path / f"{name}.txt{archive}", content))
        assert f"{name}.txt{archive} is not a whole {kind} archive" in message
    assert f"unpack it and drop {archive}" in packed("a.parquet", b"x")
    assert f"neither its ending ({archive}) nor its contents" in packed("no_format", b"x")


def test_csv_cells_are_text_and_never_guessed(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\nNA,1\n2020-01-01,01\nnull,True\nx,\n")
    assert list(load_file(path)) == [
        {"text": "NA", "label": "1"},
        {"text": "2020-01-01", "label": "01"},
        {"text": "null", "label": "True"},
        {"text": "x", "label": None},
    ]


def test_json_types_stay_and_dates_are_text(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "2020-01-01", "label": 3}\n{"text": "x", "other": [1]}\n')
    assert list(load_file(path)) == [
        {"text": "2020-01-01", "label": 3, "other": None},
        {"text": "x", "label": None, "other": [1]},
    ]


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_line_ends_and_byte_order_mark(tmp_path, head, end):
    wanted = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    table = head + end.join(["text,label", "a,x", "b,y", ""]).encode()
    lines = head + end.join(json.dumps(row) for row in wanted).encode()
    assert list(load_file(write(tmp_path / "a.csv", table))) == wanted
    assert list(load_file(write(tmp_path / "a.jsonl", lines))) == wanted


def test_many_batches_of_rows_keep_order_and_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BATCH", 3)
    rows = [{"id": place, "score": place if place < 5 else place + 0.5} for place in range(10)]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert [row["id"] for row in load_file(path)] == list(range(10))
    assert [row["score"] for row in load_file(path)] == [float(row["score"]) for row in rows]


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "a.csv", "text\na\n")
    assert load_file(path)["text"][:] == ["a"]
    write(tmp_path / "a.csv", "text\nb\n")
    os.utime(path, (1, datetime.datetime.now().timestamp() + 5))
    assert load_file(path)["text"][:] == ["b"]


def test_a_missing_file_names_the_path_that_was_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "sub" / "no.csv") in fault("sub/no.csv")


def test_a_folder_and_an_unknown_ending(tmp_path):
    assert "is not a file" in fault(str(tmp_path))
    message = fault(write(tmp_path / "a.xlsx", "x"))
    assert ".xlsx" in message and ".parquet" in message


@pytest.mark.parametrize(
    "name", ["a.csv", "a.json", "a.jsonl", "a.parquet", "a.arrow", "a.txt", "a.bio", "a.csv.gz"]
)
def test_an_empty_file(tmp_path, name):
    assert "is empty" in fault(write(tmp_path / name, ""))


@pytest.mark.parametrize("name, content", [("a.csv", "text,label\n"), ("a.json", "[]"), ("a.jsonl", "\n\n")])
def test_a_file_without_rows(tmp_path, name, content):
    assert "has no rows" in fault(write(tmp_path / name, content))


@pytest.mark.parametrize(
    "content, line",
    [
        ("text,label\na,x\nb\n", 3),
        ("text,label\na,x\nb,y,z\n", 3),
        ('text,label\n"two\nlines",x\n\nb,y,z\n', 5),
        ('text,label\na,x\n"b"c,y\n', 3),
        ('text,label\na,x\n"never closed,y\n', 3),
        ("text,text\na,x\n", 1),
    ],
    ids=["short", "long", "after a quoted line end", "text after quote", "open quote", "twice"],
)
def test_a_broken_csv_gives_its_line(tmp_path, content, line):
    assert f"a.csv, line {line}: " in fault(write(tmp_path / "a.csv", content))


@pytest.mark.parametrize(
    "name, content, place",
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "line 2"),
        ("a.jsonl", '{"text": "a"}\n\n[1]\n', "line 3"),
        ("a.json", '{"text": "a"}\n{"text": }\n', "line 2"),
        ("a.json", '[{"text": "a"},\n {"text": "b",}]', "line 2"),
        ("a.json", '[{"text": "a"}, 3]', "item 2"),
        ("a.json", '{\n"rows": 3\n}', "one JSON value"),
    ],
)
def test_broken_json_gives_its_place(tmp_path, name, content, place):
    assert place in fault(write(tmp_path / name, content))


@pytest.mark.parametrize("batch", [1, 100])
def test_mixed_kinds_of_cells_give_both_lines(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(tables, "_BATCH", batch)
    path = write(tmp_path / "a.jsonl", '{"label": 1}\n{"label": null}\n{"label": "pos"}\n')
    message = fault(path)
    assert "line 3" in message and "label" in message and '"pos"' in message and "line 1" in message


@pytest.mark.parametrize("at", [0, 11, 5000, (1 << 20) - 1, (1 << 20) + 1, 3_000_000])
def test_a_wrong_byte_is_located(tmp_path, at):
    # "é" takes two bytes, so that the chunks of any even size end inside a character at odd offsets.
    content = ("x" + "é" * 2_000_000).encode()
    at = at if content[at : at + 1] in b"x\xc3" else at + 1
    broken = content[:at] + b"\xff" + content[at + 1 :]
    assert f"byte {at} (from 0) is 0xff" in fault(write(tmp_path / "a.csv", broken))


def test_a_cut_character_at_the_end_and_latin_1_and_utf_16(tmp_path):
    assert "byte 6 (from 0) is 0xc3" in fault(write(tmp_path / "a.csv", b"text\nx\xc3"))
    assert "byte 6 (from 0) is 0xe9" in fault(write(tmp_path / "b.csv", "text\nxé\n".encode("latin-1")))
    assert "UTF-16" in fault(write(tmp_path / "c.csv", "text\nx\n".encode("utf-16")))


def test_half_a_surrogate_pair_and_a_huge_number(tmp_path):
    message = fault(write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n'))
    assert "surrogate" in message and "line 2: column text" in message
    assert "a.json, line 1: column label" in fault(write(tmp_path / "a.json", '{"label": 1' + "0" * 30 + "}"))


@pytest.mark.parametrize(
    "rows, place, column",
    [
        ([{"tags": ["O", "B"]}, {"tags": ["O", 3]}], "item 2", "tags[]"),
        ([{"a": {"b": "x"}}, {"a": {"b": [1]}}], "item 2", "a.b"),
        ([{"a": [{"b": True}]}, {"a": None}, {"a": [{"b": True}, {"b": 0}]}], "item 3", "a[].b"),
    ],
)
def test_mixed_kinds_inside_of_lists_and_objects(tmp_path, rows, place, column):
    message = fault(write(tmp_path / "a.json", json.dumps(rows)))
    assert f"{place}: column {column} holds" in message and "item 1" in message


def test_optional_keys_of_objects_become_nulls(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BATCH", 1)
    rows = [{"messages": [{"role": "a", "n": 1}]}, {"messages": [{"role": "b", "name": "c", "n": 0.5}]}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert list(load_file(path)) == [
        {"messages": [{"role": "a", "n": 1.0, "name": None}]},
        {"messages": [{"role": "b", "n": 0.5, "name": "c"}]},
    ]


def test_a_torn_arrow_file(tmp_path):
    table = pa.table({"text": ["x" * 1000] * 1000})
    for name, new in (("a.arrow", pa.ipc.new_stream), ("b.arrow", pa.ipc.new_file)):
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
        whole = (tmp_path / name).read_bytes()
        message = fault(write(tmp_path / f"torn_{name}", whole[: len(whole) // 2]))
        assert f"torn_{name} is not a whole Arrow file" in message
    assert "c.arrow is not a whole Arrow file" in fault(write(tmp_path / "c.arrow", "text\nx\n"))


def test_a_torn_parquet_file(tmp_path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    assert "parquet" in fault(write(tmp_path / "b.parquet", whole[: len(whole) // 2]))


def test_a_cell_longer_than_the_csv_module_allows_by_default(tmp_path):
    before = csv.field_size_limit()
    path = write(tmp_path / "a.csv", "text\n" + "x" * (before + 1) + "\n")
    assert len(load_file(path)["text"][0]) == before + 1
    assert csv.field_size_limit() == before
