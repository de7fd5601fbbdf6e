"""Compiled models: few graphs for many shapes, and the same losses."""

from __future__ import annotations

import json

import pytest

from recipes.text_classification import main
from tests.launch import call

FLAGS = (
    "--max_steps=10",
    "--max_train_samples=300",
    "--max_eval_samples=20",
    "--max_length=64",
    "--dropout=0",
    "--logging_steps=1",
    "--save_strategy=no",
    "--pad_to_multiple_of=8",
)


@pytest.mark.slow
def test_many_shapes_need_few_graphs(tmp_path):
    """aot_eager traces and splits as inductor does, and compiles no C++."""
    found = {}
    for name, more in (("plain", ()), ("compiled", ("--torch_compile_backend=aot_eager",))):
        assert call(main, *FLAGS, *more, f"--output_dir={tmp_path}/{name}") == 0
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        found[name] = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert found["compiled"] == pytest.approx(found["plain"], rel=1e-5)
    results = json.loads((tmp_path / "compiled" / "all_results.json").read_text())
    # One of training and one of evaluation, and one more each where a size of 1 is a case of its own.
    assert 1 <= results["compiled_graphs"] <= 4
