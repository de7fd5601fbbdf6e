"""What a person sees of long work: a bar on a terminal, and a line now and then where there is none."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import datasets

logger = logging.getLogger(__name__)

# Work that is done sooner says nothing; what lasts longer says so again and again.
_FIRST_LINE_SECONDS = 5.0
_NEXT_LINE_SECONDS = 60.0


@contextmanager
def progress_bars() -> Iterator[None]:
    """Bars of the datasets library, only in a terminal, and only from the first machine."""
    were_off = datasets.are_progress_bars_disabled()
    if not sys.stderr.isatty() or os.environ.get("GROUP_RANK", "0") != "0":
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()


@contextmanager
def life_signs(describe: Callable[[], str]) -> Iterator[None]:
    """Says what is being done, behind 5 s and then every minute; nothing on a terminal.

    The log is that of rank 0 (the others' shows errors only).

    Args:
        describe: What is done and how far it is; called from another thread.
    """
    if sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    started = time.perf_counter()

    def tell() -> None:
        wait = _FIRST_LINE_SECONDS
        while not over.wait(wait):
            logger.info("%s, %s so far", describe(), duration(time.perf_counter() - started))
            wait = _NEXT_LINE_SECONDS

    thread = threading.Thread(target=tell, name="hf_dist-life-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def duration(seconds: float) -> str:
    """Seconds for people, to two digits or so: `45 s`, `12 min`, `3.4 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
