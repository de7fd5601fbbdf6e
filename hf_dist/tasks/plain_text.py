"""A column of plain text, as both kinds of language models take it."""

from __future__ import annotations

import logging

from datasets import Dataset

from hf_dist.data import labels
from hf_dist.errors import DataError

logger = logging.getLogger(__name__)

TEXT_COLUMNS = ("text", "content", "document", "body")


def texts_of(rows: Dataset, column: str, *, split: str) -> Dataset:
    """The column, named `text`; blank texts are left out and counted in the log.

    Raises:
        DataError: a text is missing, or all are blank.
    """
    blank = labels.check_text(rows, column, split=split)
    texts = rows.select_columns([column])
    if column != "text":
        texts = texts.rename_column(column, "text")
    if blank:
        logger.info("%s: %d blank texts are left out", split, blank)
        texts = texts.select([at for at, text in enumerate(texts["text"]) if text.strip()])
    if len(texts) == 0:
        raise DataError(f"column {column} of the {split} data is blank in every row; expected text")
    return texts
