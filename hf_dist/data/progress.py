"""Progress bars of the datasets library: one where somebody looks, none elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import datasets


@contextmanager
def progress_bars() -> Iterator[None]:
    """Bars only in a terminal, and only from the first machine."""
    were_off = datasets.are_progress_bars_disabled()
    if not sys.stderr.isatty() or os.environ.get("GROUP_RANK", "0") != "0":
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()
