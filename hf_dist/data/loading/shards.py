"""Several files as one data set: a folder of shards, or a pattern."""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets.arrow_writer import ArrowWriter

from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.data.labels import describe
from hf_dist.data.loading.split_names import split_of_ending, split_of_file
from hf_dist.data.readers.files import endings, format_of, has_known_ending, load_file
from hf_dist.data.readers.formats import AnyFormat, suffixes
from hf_dist.data.readers.json_cells import JsonColumns
from hf_dist.errors import DataError

logger = logging.getLogger(__name__)


# Files that stand beside data and are none, by the first part of their name and by their ending.
_NOTES = frozenset({"readme", "license", "licence", "notice", "copying", "changelog", "citation"})
_NO_DATA = frozenset(
    {".md", ".rst", ".html", ".pdf", ".py", ".sh", ".yaml", ".yml", ".toml", ".log", ".lock"}
)


def files_of(name: str, file_format: str | None = None) -> list[Path]:
    """The files that a flag's value stands for: one file, those of a folder, or those of a pattern.

    Of a folder those with a known ending are taken, sorted by name; where there is none, or `file_format`
    says what they are, all of them. Those in folders below it are left out, and also of a pattern those
    whose name starts with a dot or an underscore and notes such as README; the log names them.

    Raises:
        DataError: there is none, or a folder's files belong to several splits.
    """
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _files_in(path, file_format)
    if not path.exists() and glob.has_magic(name):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [match for match in found if match.is_file()]
        if not files:
            raise DataError(f"no file matches {path}; check the pattern (** stands for folders at any depth)")
        taken = [match for match in files if match.name[0] != "_" and not _is_note(match)] or files
        _log_others(path, taken, files)
        return taken
    return [path]


def _files_in(folder: Path, file_format: str | None) -> list[Path]:
    try:
        inside = sorted(folder.iterdir())
    except PermissionError as error:
        raise DataError(f"{folder} can't be read ({error.strerror}); change its permissions") from error
    files = [path for path in inside if path.is_file() and path.name[0] not in "._" and not _is_note(path)]
    shards = files
    if file_format is None:
        known = [path for path in files if has_known_ending(path)]
        shards = known or [path for path in files if path.suffix.lower() not in _NO_DATA]
    if not shards:
        found = ", ".join(path.name for path in inside[:5]) or "nothing"
        raise DataError(f"{folder} holds no file to read (found: {found}); expected {', '.join(endings())}")
    splits = {split: path.name for path in shards if (split := _split_of(path))}
    if len(splits) > 1:
        raise DataError(
            f"{folder} holds files of several splits ({', '.join(splits.values())}); give them apart, as "
            "--train_file, --validation_file and --test_file, or the folder as --dataset_name"
        )
    _log_others(folder, shards, inside)
    return shards


def _is_note(path: Path) -> bool:
    return path.name.lower().partition(".")[0] in _NOTES


def _split_of(path: Path) -> str | None:
    ending, _ = suffixes(path)
    return split_of_file(path.stem) or (None if ending in endings() else split_of_ending(ending))


def _log_others(source: Path, taken: Sequence[Path], there: Sequence[Path]) -> None:
    others = [path.name for path in there if path not in set(taken)]
    if others:
        logger.info("%s: %d files are read, and %s left out", source, len(taken), ", ".join(others[:5]))


def formats_of(files: Sequence[Path], file_format: str | None = None) -> list[AnyFormat]:
    """The format of each file; the log says in one line what was told by contents.

    Raises:
        DataError: as `format_of`.
    """
    forms = [format_of(path, file_format) for path in files]
    told = [] if file_format else [at for at, path in enumerate(files) if not has_known_ending(path)]
    if told:
        first, more = files[told[0]], f" and {len(told) - 1} more files" if told[1:] else ""
        kinds = ", ".join(sorted({forms[at].name for at in told}))
        logger.info("%s%s: read as %s, by the contents (--file_format overrules that)", first, more, kinds)
    return forms


def load_files(
    files: Sequence[Path],
    file_format: str | None = None,
    *,
    json_columns: JsonColumns = frozenset(),
) -> Dataset:
    """Reads files one after the other into one data set.

    Whole numbers become fractions where other files have those, and a column without values takes its type
    from the others.

    Args:
        files: one or more.
        file_format: what they hold; None as `format_of` finds it.
        json_columns: columns whose cells are kept as JSON text.

    Raises:
        DataError: as `load_file`; or a file has other columns than the first, or a column of another type.
    """
    forms = formats_of(files, file_format)
    shards = [
        load_file(path, form.name, json_columns=json_columns) for path, form in zip(files, forms, strict=True)
    ]
    first = shards[0]
    if len(shards) == 1:
        return first
    schema = first.features.arrow_schema
    typed_by = dict.fromkeys(first.column_names, 0)  # the shard that a column's type is from
    for number, (path, shard) in enumerate(zip(files, shards, strict=True)):
        check_columns(path, shard.column_names, files[0], first.column_names)
        for column in first.column_names:
            before = shards[typed_by[column]]
            if shard.features[column] == before.features[column]:
                continue
            merged = _merged(before, shard, schema, column)
            if merged is None:
                first_path = files[typed_by[column]]
                raise DataError(
                    f"{path}: column {column} holds {describe(shard, column)} where {first_path} holds "
                    f"{describe(before, column)}; write one kind"
                )
            if merged != schema:
                schema = merged
                typed_by[column] = number
    return concatenate_datasets([_cast(shard, schema) for shard in shards])


def check_columns(path: Path, columns: Sequence[str], first: Path, expected: Sequence[str]) -> None:
    """Raises a DataError unless a file has the columns of the first one, in whatever order."""
    missing = [column for column in expected if column not in columns]
    more = [column for column in columns if column not in expected]
    if missing or more:
        lacks = f"lacks {', '.join(missing)}" if missing else f"also has {', '.join(more)}"
        raise DataError(
            f"{path} has other columns than {first}: it {lacks}; files of one split need the same columns"
        )


def _merged(before: Dataset, shard: Dataset, schema: pa.Schema, column: str) -> pa.Schema | None:
    """The schema with a type for both values of a column, or None if there is none."""
    field, other = schema.field(column), shard.features.arrow_schema.field(column)
    if field.type == other.type or _has_classes(before, column) or _has_classes(shard, column):
        return None  # the same numbers stand for other classes
    try:
        one = pa.unify_schemas([pa.schema([field]), pa.schema([other])], promote_options="permissive")
    except pa.ArrowException:
        return None
    return schema.set(schema.get_field_index(column), one.field(0))


def _has_classes(dataset: Dataset, column: str) -> bool:
    return "ClassLabel" in repr(dataset.features[column])


def _cast(shard: Dataset, schema: pa.Schema) -> Dataset:
    """The shard with another's types, in the cache beside it."""
    if shard.features.arrow_schema.equals(schema):
        return shard
    cached = Path(shard.cache_files[0]["filename"]).parent.name

    def build(folder: Path) -> None:
        table = shard.select_columns(schema.names).with_format("arrow")[:]
        with ArrowWriter(path=str(folder / "data.arrow")) as writer:
            writer.write_table(pa.concat_tables([schema.empty_table(), table], promote_options="permissive"))
            writer.finalize()

    folder = build_once(cache_dir() / "files" / key_of(cached, str(schema)), build)
    return Dataset.from_file(str(folder / "data.arrow"))
