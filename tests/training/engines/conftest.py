"""Configurations of a user's own."""

import json

import pytest

from hf_dist.presets.catalogue import ds_config


@pytest.fixture
def own(tmp_path):
    def write(name="mine.json", **changes):
        config = {**ds_config("zero2"), **changes}
        file = tmp_path / name
        file.write_text(json.dumps(config))
        return str(file)

    return write
