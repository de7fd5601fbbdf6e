"""The recipe as its users meet it: real processes, real files."""

import json
import subprocess

import pytest
import yaml

from hf_dist.training.checkpoints.facts import run_facts
from recipes.text_classification import build, main
from tests.launch import BIN, ROOT, SMALL, call, logged, only_error, run, start

RECIPE = "text_classification"
ROWS = [("good " * 3, "pos"), ("bad " * 4, "neg"), ("fine day", "pos"), ("poor thing", "neg")] * 8


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "dev.jsonl").write_text("\n".join(lines[:8]) + "\n")
    (folder / "test.csv").write_text("text,label\n" + "\n".join(f"{t},{la}" for t, la in ROWS[:5]) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A model trained on the files, and its results."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = [f"--train_file={files}/train.jsonl", f"--validation_file={files}/dev.jsonl"]
    return folder, run(RECIPE, *SMALL, "--max_steps=20", *flags, output_dir=folder)


def test_results_are_complete(trained):
    folder, results = trained
    for name in (
        "train_tokens_per_second",
        "padding_efficiency",
        "rank_imbalance",
        "train_loss",
        "eval_loss",
        "eval_accuracy",
        "eval_f1_macro",
        "eval_majority_baseline",
    ):
        assert isinstance(results[name], float), name
    assert (results["engine"], results["world_size"]) == ("single", 1)
    assert 0 < results["padding_efficiency"] <= 1
    # Half of the validation rows bear each label.
    assert results["eval_majority_baseline"] == 0.5
    assert results["eval_accuracy"] > 0.9
    for name in ("model.safetensors", "config.json", "tokenizer.json", "trainer_state.json", "run.json"):
        assert (folder / name).stat().st_size > 0, name
    record = json.loads((folder / "run.json").read_text())
    assert record["engine"] == "single"
    assert record["seed"] == 42
    assert record["config"]["batching"]["max_tokens_per_device"] == 1024
    state = json.loads((folder / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(1, 21))


def test_labels_are_kept_in_the_saved_config(trained):
    config = json.loads((trained[0] / "config.json").read_text())
    assert config["id2label"] == {"0": "neg", "1": "pos"}


def test_the_saved_model_runs_in_a_pipeline(trained):
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(trained[0]), device="cpu")
    assert [found["label"] for found in classify(["good good good", "bad bad bad"])] == ["pos", "neg"]


def test_eval_and_predict_alone_on_a_saved_model(trained, files, tmp_path):
    folder, results = trained
    status = call(
        main,
        f"--model_name_or_path={folder}",
        "--max_length=32",
        "--do_eval",
        "--do_predict",
        f"--validation_file={files}/dev.jsonl",
        f"--test_file={files}/test.csv",
        f"--output_dir={tmp_path / 'again'}",
    )
    assert status == 0
    again = json.loads((tmp_path / "again" / "all_results.json").read_text())
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
    assert again["eval_accuracy"] == results["eval_accuracy"]
    predictions = [json.loads(line) for line in (tmp_path / "again" / "predictions.jsonl").open()]
    assert [entry["prediction"] for entry in predictions] == [label for _, label in ROWS[:5]]


def test_labels_of_the_evaluation_data_alone_are_classes_that_count(files, tmp_path):
    """In files whose ending says nothing; a model's own list of classes then stays for a part of them."""
    dev = [("good", "pos"), ("a zebra", "zebra"), ("bad", "neg"), ("apes", "ape"), ("zoo", "zebra")]
    for name, rows in (("train", ROWS), ("dev", dev)):
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        (tmp_path / f"rows.{name}").write_text("\n".join(lines))
    flags = [*SMALL, "--eval_strategy=no", f"--validation_file={tmp_path}/rows.dev"]
    flags += [f"--test_file={tmp_path}/rows.dev"]
    first = [*flags, f"--train_file={tmp_path}/rows.train", "--do_train", "--do_eval", "--do_predict"]
    with logged() as lines:
        assert call(main, *first, "--max_steps=20", f"--output_dir={tmp_path / 'first'}") == 0
    said = "\n".join(lines)
    assert (
        "2 labels occur only in the validation data (3 rows) and never in the training data: ape, zebra"
        in said
    )
    assert said.count("rows.train: read as jsonl, by the contents") == 1
    found = json.loads((tmp_path / "first" / "all_results.json").read_text())
    answers = [json.loads(line)["prediction"] for line in (tmp_path / "first" / "predictions.jsonl").open()]
    right = sum(answer == label for answer, (_, label) in zip(answers, dev, strict=True))
    assert 0 < right < len(dev)
    assert found["eval_accuracy"] == found["test_accuracy"] == pytest.approx(right / len(dev))
    assert found["eval_loss"] > 1  # of three rows it has never seen the class

    # Other rows of two of the four classes: the list stays, and nothing is new any more.
    more = [f"--train_file={files}/train.jsonl", f"--model_name_or_path={tmp_path / 'first'}"]
    with logged() as lines:
        assert call(main, *flags, *more, f"--output_dir={tmp_path / 'second'}") == 0
    assert lines and "occur only" not in "\n".join(lines)
    for run_ in ("first", "second"):
        config = json.loads((tmp_path / run_ / "config.json").read_text())
        assert config["id2label"] == {"0": "ape", "1": "neg", "2": "pos", "3": "zebra"}


def test_what_a_resumed_run_must_agree_on_stays_the_same(files, tmp_path):
    """The order of the rows that bring new labels does not matter, and the labels do."""
    facts = []
    for number, labels in enumerate((["ape", "zebra"], ["zebra", "ape"], ["ape"])):
        rows = [{"text": "x", "label": label} for label in [*labels, "pos"]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        recipe = build(
            train_file=f"{files}/train.jsonl",
            validation_file=f"{tmp_path}/{number}.jsonl",
            max_steps=2,
            output_dir=str(tmp_path / str(number)),
        )
        model, tokenizer = recipe.model, recipe.tokenizer
        facts.append(run_facts(model.config, tokenizer, recipe.datasets["train"], recipe.plan))
    assert facts[0] == facts[1]
    assert facts[0]["model"] != facts[2]["model"] and facts[0]["plan"] == facts[2]["plan"]


def test_several_labels_of_the_evaluation_data_alone(tmp_path):
    rows = [{"text": "good", "labels": ["x", "y"]}, {"text": "bad", "labels": []}] * 8
    dev = [{"text": "good", "labels": ["y", "new"]}, {"text": "bad", "labels": []}]
    for name, lines in (("train", rows), ("dev", dev)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--train_file={tmp_path}/train.jsonl", f"--validation_file={tmp_path}/dev.jsonl"]
    with logged() as lines:
        assert call(main, *SMALL, *flags, f"--output_dir={tmp_path / 'out'}") == 0
    assert "1 label occurs only in the validation data (1 row)" in "\n".join(lines)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "new", "1": "x", "2": "y"}


@pytest.mark.parametrize("labels", ["pos", ["pos"]])
def test_a_stream_that_shows_a_new_label_late_ends_with_one_line(labels, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_dist.data.loading.streams._SHOWN_ROWS", 20)
    named = (lambda name: [name]) if isinstance(labels, list) else str
    rows = [{"text": "x", "label": named(name)} for name in [*["pos", "neg"] * 10, "zebra", "pos"]]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    flags = [f"--train_file={tmp_path}/train.jsonl", f"--validation_file={tmp_path}/dev.jsonl", "--streaming"]
    small = [flag for flag in SMALL if "max_train_samples" not in flag]
    assert call(main, *small, *flags, f"--output_dir={tmp_path / 'out'}") != 0
    assert "that the first part of the training data never shows: zebra" in only_error(
        capsys.readouterr().err
    )


def test_two_processes_run_ddp(tmp_path):
    results = run(RECIPE, *SMALL, output_dir=tmp_path / "ddp", nproc=2)
    assert (results["engine"], results["world_size"]) == ("ddp", 2)


def test_two_processes_run_a_real_deepspeed_engine(tmp_path):
    results = run(RECIPE, *SMALL, "--preset=zero2", output_dir=tmp_path / "zero2", nproc=2)
    assert (results["engine"], results["world_size"]) == ("deepspeed-zero2", 2)
    assert (tmp_path / "zero2" / "model.safetensors").stat().st_size > 0


def test_dry_run_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(main, "--dry_run", "--max_train_samples=100", "--num_train_epochs=2") == 0
    settings, _, facts = capsys.readouterr().out.partition("\n\n")
    assert yaml.safe_load(settings)["data"]["max_train_samples"] == 100
    for fact in ("steps: ", "efficiency", "engine: single"):
        assert fact in facts
    assert list(tmp_path.iterdir()) == []


def test_yaml_with_a_flag_over_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("data: {max_train_samples: 100}\ntraining: {learning_rate: 1e-4}\n")
    assert call(main, f"--config={file}", "--learning_rate=2e-4", "--dry_run") == 0
    settings = yaml.safe_load(capsys.readouterr().out.partition("\n\n")[0])
    assert settings["training_arguments"]["learning_rate"] == 2e-4
    assert settings["data"]["max_train_samples"] == 100


def test_accelerate_launch_runs_it(files, tmp_path):
    done = subprocess.run(
        [str(BIN / "accelerate"), "launch", str(ROOT / "recipes" / f"{RECIPE}.py"), *SMALL,
         f"--train_file={files}/train.jsonl", f"--output_dir={tmp_path / 'out'}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["engine"] == "single"


def test_build_from_python(files, tmp_path):
    recipe = build(
        train_file=str(files / "train.jsonl"),
        max_steps=2,
        max_length=32,
        save_strategy="no",
        output_dir=str(tmp_path / "out"),
    )
    assert recipe.model.config.id2label == {0: "neg", 1: "pos"}
    assert set(recipe.collator([recipe.datasets["train"][0]])) >= {"input_ids", "labels"}
    assert recipe.tokenizer.pad_token_id is not None
    assert recipe.plan.steps_per_epoch > 0
    assert recipe.run()["engine"] == "single"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lerning_rate=1"], "unknown flag --lerning_rate (did you mean --learning_rate?)"),
        (["--train_file=nowhere.csv"], "nowhere.csv"),
        (["--train_file={empty}"], "empty.csv"),
        (["--train_file={train}", "--text_column=txt"], "txt"),
        (["--train_file={train}", "--validation_file={unseen}"], "zebra"),
        (["--preset=zero9"], "zero2"),
        (["--output_dir={finished}"], "holds a finished run"),
        (["--do_eval"], "--model_name_or_path"),
        (["--train_file={train}", "--max_tokens_per_device=8", "--max_length=32"], "--max_tokens_per_device"),
    ],
)
def test_bad_input_is_one_line_before_any_training(flags, expected, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "unseen.jsonl").write_text(json.dumps({"text": "x", "label": "zebra"}) + "\n")
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "all_results.json").write_text("{}")
    places = {
        "empty": tmp_path / "empty.csv",
        "train": files / "train.jsonl",
        "unseen": tmp_path / "unseen.jsonl",
        "finished": finished,
    }
    before = sorted(tmp_path.rglob("*"))
    assert call(main, *[flag.format(**places) for flag in flags]) != 0
    assert expected in only_error(capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_on_two_processes_is_shown_once(tmp_path):
    done = start(RECIPE, "--preset=zero9", nproc=2, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_without_a_folder_take_the_next_free_one(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in ("001", "002"):
        assert call(main, *SMALL, f"--train_file={files}/train.jsonl") == 0
        assert (tmp_path / "runs" / f"text_classification-{number}" / "all_results.json").exists()


@pytest.mark.slow
def test_built_in_data_beats_its_baseline(tmp_path):
    found = run(RECIPE, output_dir=tmp_path / "out")
    assert found["eval_accuracy"] > found["eval_majority_baseline"] + 0.4
