"""Every test runs without a network, on few threads, in a cache of its own session."""

from __future__ import annotations

import os
from pathlib import Path

# Before any library reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# DeepSpeed compiles its operators once a checkout. In torch's own folder a build that was killed leaves a
# lock on which the next one waits forever, and every other environment compiles them anew.
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR", str(Path(__file__).parent.parent / ".cache" / "torch_extensions")
)

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """What tests cache is built anew each session, and the user's caches are left alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DIST_CACHE", str(folder / "hf_dist"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        yield folder
