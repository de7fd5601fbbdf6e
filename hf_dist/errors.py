"""The errors a user can act on.

Every message says what was found, what was expected and how to mend it, in one line. Recipes and the
command line turn an `HfDistError` into that one line on rank 0 and a non-zero exit status; anything
else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable


class HfDistError(Exception):
    """Base of all errors that hf_dist raises on purpose."""


class ConfigError(HfDistError):
    """A flag, a YAML key or a combination of settings is wrong."""


class DataError(HfDistError):
    """A data set, a file, a column or a label is not what the task needs."""


class EngineError(HfDistError):
    """The engine that runs is not the one that was asked for, or it can't run here."""


class CheckpointError(HfDistError):
    """A checkpoint or an output folder can't be used."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]}?)" if match else ""


# Where all ranks fail alike, the launcher ends the others within a fraction of this once rank 0 is gone.
_PATIENCE_SECONDS = 15.0


def exit_on_error(main: Callable[[], None]) -> None:
    """Runs `main`; an `HfDistError` becomes one line on stderr and exit status 2.

    Rank 0 speaks for all. Another rank waits a moment for its launcher to end it, and speaks if it is still
    there: then the error is its own. The rank is read from the environment, since most of these errors are
    raised before a process group exists.
    """
    try:
        main()
    except HfDistError as error:
        message = " ".join(str(error).split())
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_PATIENCE_SECONDS)
            message = f"rank {rank} on {socket.gethostname()}: {message}"
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)
