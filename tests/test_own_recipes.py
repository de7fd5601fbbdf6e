"""A task and a file format from outside the package: those of docs/own_recipes.md, as they stand there."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dist.config import DataConfig
from hf_dist.data.loading.streams import load_stream
from hf_dist.data.readers.files import endings, formats
from hf_dist.errors import ConfigError, DataError
from hf_dist.recipes import TextFormat, file_formats, load_splits
from hf_dist.verify import recipe_file
from recipes import text_classification
from tests.launch import ROOT, call, losses, only_error, start

ROWS = [(number, f"the text of {number} words") for number in (0, 1, 3, 5, 2, 7, 9, 4)]
LINES = "".join(f"{number} | {text}\n" for number, text in ROWS)
LABELS = torch.tensor([number % 2 for number, _ in ROWS])


def loss_of(model, texts) -> float:
    """By the model's own logits, with nothing of hf_dist."""
    with torch.no_grad():
        logits = model.eval()(**texts.to(model.device)).logits
    return torch.nn.functional.cross_entropy(logits, LABELS.to(logits.device)).item()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder with the two files of the page and some rows; both are forgotten again."""
    page = (ROOT / "docs" / "own_recipes.md").read_text()
    format_code, recipe_code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "toy_format.py").write_text(format_code)
    (tmp_path / "toy_recipe.py").write_text(recipe_code)
    (tmp_path / "rows.bars").write_text(LINES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("toy_format", "toy_recipe"):
        sys.modules.pop(name, None)


def small(folder, nproc=1, **more):
    return {
        "train_file": str(folder / "rows.bars"),
        "validation_file": str(folder / "rows.bars"),
        "output_dir": str(folder / "run"),
        "max_steps": 2,
        # All rows in one step.
        "batching": "examples",
        "per_device_train_batch_size": 8 // nproc,
        "dropout": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        **more,
    }


def test_a_task_and_a_format_from_outside_train_and_go(outside):
    import toy_recipe

    before = formats(), endings()
    recipe = toy_recipe.build(**small(outside))
    assert (formats(), endings()) == before, "the format outlives what it was brought for"
    tokenizer = recipe.tokenizer
    texts = tokenizer([text for _, text in ROWS], padding=True, return_tensors="pt")
    first = loss_of(recipe.model, texts)
    results = recipe.run()
    assert losses(outside / "run")[0] == pytest.approx(first, rel=1e-5)
    # What is saved is what was trained, and the score is that of a model loaded without hf_dist.
    saved = AutoModelForSequenceClassification.from_pretrained(outside / "run")
    assert AutoTokenizer.from_pretrained(outside / "run").get_vocab() == tokenizer.get_vocab()
    assert results["eval_loss"] == pytest.approx(loss_of(saved, texts), rel=1e-5)
    assert results["eval_loss"] != pytest.approx(first, rel=1e-3)
    guesses = saved(**texts).logits.argmax(-1)
    assert results["eval_accuracy"] == pytest.approx((guesses == LABELS).float().mean().item())
    assert load_file(outside / "run" / "model.safetensors")["classifier.bias"].shape == (2,)
    # Without it the format is unknown.
    stock = small(outside, label_column="number", output_dir=str(outside / "other"))
    with pytest.raises(DataError, match=r"rows.bars: neither its ending \(\.bars\) nor its contents say"):
        text_classification.build(**stock)
    with pytest.raises(DataError, match="--file_format bars: there is no such format"):
        text_classification.build(**stock, file_format="bars")


def test_a_format_from_outside_on_the_command_line(outside, capsys):
    import toy_recipe

    (outside / "rows.odd.gz").write_bytes(gzip.compress(LINES.encode()))
    flags = [f"--train_file={outside / 'rows.odd.gz'}", "--max_steps=1", f"--output_dir={outside / 'run'}"]
    assert call(toy_recipe.main, *flags, "--file_format=bars", "--dry_run") == 0
    assert "file_format: bars" in capsys.readouterr().out
    assert call(text_classification.main, *flags, "--file_format=bars") == 2
    assert "invalid choice: 'bars'" in only_error(capsys.readouterr().err)
    (outside / "broken.bars").write_text("1 | a\nb\n")
    flags = [f"--train_file={outside / 'broken.bars'}", f"--output_dir={outside / 'run'}"]
    assert call(toy_recipe.main, *flags) == 2
    assert "broken.bars, line 2: expected a number" in only_error(capsys.readouterr().err)


@pytest.mark.slow
def test_two_processes_read_a_format_from_outside(outside):
    flags = [f"--{name}={value}" for name, value in small(outside, nproc=2).items()]
    # A path: `start` takes names of ours, and a name with a folder in front is one too.
    done = start(str(outside / "toy_recipe"), *flags, nproc=2)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((outside / "run" / "all_results.json").read_text())["world_size"] == 2
    import toy_recipe

    # The seed is the same, so this is the model that the two started with.
    recipe = toy_recipe.build(**small(outside, output_dir=str(outside / "other")))
    texts = recipe.tokenizer([text for _, text in ROWS], padding=True, return_tensors="pt")
    first, second = losses(outside / "run")
    assert first == pytest.approx(loss_of(recipe.model, texts), rel=1e-5)
    assert second != first


def test_a_format_with_a_recipe_of_ours_and_streams_that_outlive_it(outside):
    from toy_format import BARS

    wanted = [{"number": number, "text": text} for number, text in ROWS]
    data = DataConfig(train_file=str(outside / "rows.bars"))
    with file_formats(BARS):
        assert list(load_splits(data, dict)["train"]) == wanted
        stream, _ = load_stream(data, dict, train_only=True)
        assert ".bars" in endings()
    assert ".bars" not in endings()
    # As a worker process gets it: by pickle, and without the block around it.
    assert list(stream) == list(pickle.loads(pickle.dumps(stream))) == wanted


def test_a_changed_reader_reads_again(outside):
    from toy_format import BARS

    def shouted(path):
        for place, row in BARS.rows(path):
            yield place, {**row, "text": row["text"].upper()}

    def texts(form):
        with file_formats(form):
            return load_splits(DataConfig(train_file=str(outside / "rows.bars")), dict)["train"]["text"][:]

    plain = [text for _, text in ROWS]
    assert texts(BARS) == plain
    changed = TextFormat(name="bars", endings=(".bars",), rows=shouted, version=2)
    assert texts(changed) == [text.upper() for text in plain]
    assert texts(BARS) == plain


def test_names_and_endings_that_clash_are_errors(outside):
    from toy_format import BARS, bar_rows

    def form(name: str, *ends: str) -> TextFormat:
        return TextFormat(name=name, endings=ends, rows=bar_rows)

    before = formats()
    for more, said in (
        ((form("csv"),), "there is a file format csv already; give the new one another name than conll, csv"),
        (
            (form("new", ".csv"),),
            "new has the ending .csv, which stands for csv; leave it out, and say --file",
        ),
        ((BARS, BARS), "there is a file format bars already"),
        ((BARS, form("new", ".bars")), "new has the ending .bars, which stands for bars"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)), file_formats(*more):
            raise AssertionError("the block is entered")
        assert formats() == before
    for ending in ("bars", ".Bars", ".tar.bars", ".", ".gz"):
        with pytest.raises(ConfigError, match=re.escape(f"has the ending {ending!r}; expected one dot")):
            form("new", ending)
    for name in ("", "two words", "a|b", "Bars"):
        with pytest.raises(ConfigError, match=re.escape(f"is named {name!r}; expected a word")):
            form(name)


def test_recipes_of_installed_packages_by_name(outside, monkeypatch):
    def install(folder, points: str):
        about = outside / folder / f"{folder}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[hf_dist.recipes]\n{points}\n")
        monkeypatch.syspath_prepend(outside / folder)

    with pytest.raises(ConfigError, match="there is no recipe odd-even; expected one of causal_lm, "):
        recipe_file("odd-even")
    with monkeypatch.context() as _:
        install("toy", "odd_even = toy_recipe\nlost = toy_lost.recipe\nmasked_lm = toy_recipe")
        assert recipe_file("odd-even").samefile(outside / "toy_recipe.py")
        assert "toy_recipe" not in sys.modules, "it is looked for and not imported"
        assert recipe_file("translation").samefile(ROOT / "recipes" / "translation.py")
        with pytest.raises(ConfigError, match="expected one of causal_lm, .*translation, .*odd_even"):
            recipe_file("poetry")
        with pytest.raises(
            ConfigError, match="the recipe lost .* module toy_lost.recipe, which is not there"
        ):
            recipe_file("lost")
        with pytest.raises(
            ConfigError, match=r"several recipes are named masked_lm \(.*name one by its path"
        ):
            recipe_file("masked_lm")
        install("other", "odd_even = toy_format")
        with pytest.raises(ConfigError, match="several recipes are named odd_even"):
            recipe_file("odd_even")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="there is no recipe odd_even"):
        recipe_file("odd_even")
