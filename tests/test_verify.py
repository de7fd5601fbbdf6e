import math

import pytest
import torch
from safetensors.torch import save_file

from hf_dist.errors import ConfigError, EngineError
from hf_dist.verify import Comparison, Split, Trained, compare, parse_splits, recipe_file, train, verify
from tests.launch import ROOT


def trained(folder, losses=(1.0, 2.0), norms=(1.0, 1.0), weights=None):
    folder.mkdir(exist_ok=True)
    save_file(weights or {"w": torch.tensor([3.0, 4.0])}, folder / "model.safetensors")
    return Trained(
        losses=list(losses), grad_norms=list(norms), tokens_per_second=1.0, engine="single", folder=folder
    )


def test_splits_then_presets_on_the_widest():
    found = parse_splits("1x1,2x2,1x4", "none,zero2")
    assert [str(split) for split in found] == ["1x1 none", "2x2 none", "1x4 none", "2x2 zero2"]


@pytest.mark.parametrize("splits", ["", "1", "0x1", "1x", "ax2", "1x1,,2x2"])
def test_bad_splits(splits):
    with pytest.raises(ConfigError, match="RANKSxACCUMULATION"):
        parse_splits(splits, "none")


def test_bad_preset_is_named():
    with pytest.raises(ConfigError, match="zero9"):
        parse_splits("1x1", "none,zero9")


def test_recipes_by_name_and_path(tmp_path):
    expected = ROOT / "recipes" / "text_classification.py"
    assert recipe_file("text-classification").samefile(expected)
    assert recipe_file(str(expected)) == expected
    with pytest.raises(ConfigError, match="expected one of .*text_classification"):
        recipe_file("poetry")
    with pytest.raises(ConfigError, match="is not there"):
        recipe_file(str(tmp_path / "x.py"))


def test_differences_are_relative_and_the_largest_counts(tmp_path):
    reference = trained(tmp_path / "a")
    other = trained(tmp_path / "b", (1.0, 2.2), (0.9, 1.0), {"w": torch.tensor([3.0, 4.5])})
    found = compare(other, reference)
    # |4.5 - 4| / |(3, 4)| = 0.1
    assert (found.loss, found.grad_norm, found.weights) == pytest.approx((0.1, 0.1, 0.1))
    assert found.failures() == ["loss", "gradient norm", "weights"]
    assert compare(reference, reference) == Comparison(loss=0.0, grad_norm=0.0, weights=0.0)


def test_nan_missing_steps_and_missing_tensors_never_agree(tmp_path):
    reference = trained(tmp_path / "a")
    assert compare(trained(tmp_path / "b", (1.0, math.nan)), reference).failures() == ["loss"]
    assert compare(trained(tmp_path / "c", (math.nan, 2.0)), reference).failures() == ["loss"]
    assert compare(trained(tmp_path / "d", (1.0,)), reference).failures() == ["loss"]
    other = trained(tmp_path / "e", weights={"v": torch.tensor([3.0, 4.0])})
    assert compare(other, reference).failures() == ["weights"]


def test_tied_weights_may_be_saved_once_a_name(tmp_path):
    reference = trained(tmp_path / "a")
    copied = {"w": torch.tensor([3.0, 4.0]), "tied": torch.tensor([3.0, 4.0])}
    assert compare(trained(tmp_path / "b", weights=copied), reference).weights == 0
    other = {"w": torch.tensor([3.0, 4.0]), "extra": torch.tensor([3.0, 5.0])}
    assert compare(trained(tmp_path / "c", weights=other), reference).failures() == ["weights"]


def test_a_failing_run_says_why(tmp_path):
    script = recipe_file("text_classification")
    with pytest.raises(EngineError, match="the run 1x1 none failed: .*nowhere.csv"):
        train(
            script,
            Split(preset="none", ranks=1, accumulation=1),
            ["--train_file=nowhere.csv"],
            tmp_path / "out",
        )


SMALL = ["--max_steps=3", "--max_train_samples=200", "--max_length=32", "--max_tokens_per_device=1024"]


def test_two_ranks_agree_with_one(capsys):
    assert verify("text_classification", splits="1x1,2x2", presets="none", flags=SMALL)
    assert "agrees" in capsys.readouterr().out


@pytest.mark.slow
def test_all_engines_agree(capsys):
    assert verify("text_classification", splits="1x1,1x4,2x2", presets="none,zero1,zero2,zero3", flags=SMALL)


def test_a_difference_is_found(tmp_path, capsys):
    # Dropout draws differ from rank to rank, so that the splits must differ.
    assert not verify(
        "text_classification", splits="1x1,2x1", presets="none", flags=[*SMALL, "--dropout=0.5"]
    )
    assert "DIFFERS: 2x1 none: loss" in capsys.readouterr().out
