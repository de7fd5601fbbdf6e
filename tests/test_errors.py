import os
import subprocess
import sys
import time

import pytest

from hf_dist.errors import _PATIENCE_SECONDS, exit_on_error, nearest

FAILING = """
from hf_dist.errors import DataError, exit_on_error
def main():
    raise DataError('a column\\n is missing')
exit_on_error(main)
"""


def fail(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAILING],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_error_is_one_line_and_status_2():
    done = fail()
    assert (done.returncode, done.stderr) == (2, "error: a column is missing\n")


def test_another_rank_speaks_only_if_nobody_ends_it():
    started = time.monotonic()
    done = fail(RANK="3")
    assert time.monotonic() - started > _PATIENCE_SECONDS
    assert done.returncode == 2
    assert done.stderr.startswith("error: rank 3 on ")
    assert done.stderr.endswith(": a column is missing\n")


def test_what_is_no_error_of_ours_keeps_its_traceback():
    def main() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        exit_on_error(main)


def test_nearest_names():
    assert nearest("learning_rat", ["learning_rate", "seed"]) == " (did you mean learning_rate?)"
    assert nearest("zzz", ["learning_rate"]) == ""
