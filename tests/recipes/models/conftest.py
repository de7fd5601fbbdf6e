"""A run with an adapter that others go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import launch
from tests.recipes.models.adapter_runs import SHORT
from tests.recipes.tasks import test_text_classification as texts


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch.call(texts.main, *SHORT, "--save_total_limit=9", f"--output_dir={folder}") == 0
    return folder
