import pytest

from hf_dist.errors import ConfigError
from hf_dist.training.flags.parsing import make_config, parse

DEFAULTS = {"learning_rate": 1e-3, "max_length": 64}


def run(*words, **kwargs):
    return parse(list(words), recipe="x", defaults=DEFAULTS, **kwargs)


def test_precedence_is_defaults_then_yaml_then_flags(tmp_path):
    file = tmp_path / "run.yaml"
    # PyYAML reads 1e-4 as a string; the flag's type makes a number of it.
    file.write_text(
        "training: {learning_rate: 1e-4, max_steps: 7, bf16: true}\n"
        "data: {max_length: 32}\n"
        "tracking: {report_to: [wandb, tensorboard]}\n"
        "checkpoint: {save_steps: 5}\n"
    )
    config = run("--config", str(file), "--max_steps", "9")
    assert config.data.max_length == 32
    assert config.training_arguments == {
        "learning_rate": 1e-4,
        "max_steps": 9,
        "bf16": True,
        "report_to": ["wandb", "tensorboard"],
        "save_steps": 5.0,
        "save_strategy": "steps",
    }
    assert run().training_arguments == {"learning_rate": 1e-3}


def test_hyphens_and_bare_booleans():
    config = run("--max-steps", "3", "--bf16", "--no_dataloader_pin_memory", "--do_eval", "false")
    assert config.training_arguments == {
        "learning_rate": 1e-3,
        "max_steps": 3,
        "bf16": True,
        "dataloader_pin_memory": False,
        "do_eval": False,
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_stepz", "3"], "unknown flag --max_stepz (did you mean --max_steps?)"),
        (["stray"], "unknown flag stray"),
        (["--max_steps", "abc"], "invalid int value: 'abc'"),
        (["--eval_strategy", "sometimes"], "choose from"),
        (["--fsdp", "full_shard"], "--preset zero3"),
        (["--dropout", "2"], "--dropout is 2.0"),
        (["--max_length", "0"], "--max_length is 0"),
        (["--dataset_name", "a", "--train_file", "b"], "both name the training data"),
        (["--tokens_per_step", "8", "--batching", "examples"], "--tokens_per_step conflicts"),
        (["--config", "missing.yaml"], "missing.yaml: No such file"),
    ],
)
def test_bad_flags_say_what_is_wrong(words, expected):
    with pytest.raises(ConfigError) as caught:
        run(*words)
    assert expected in str(caught.value)


def test_conflicts_are_reported_together():
    rows = ("--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4")
    with pytest.raises(ConfigError) as caught:
        run(*rows, "--tokens_per_step", "512", "--fp16", "--bf16")
    for name in ("gradient_accumulation_steps", "per_device_train_batch_size", "--fp16 and --bf16"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {max_stepz: 3}", "unknown key max_stepz in the block training (did you mean max_steps?)"),
        ("modle: {}", "unknown block modle (did you mean model?)"),
        ("data: {preset: zero2}", "the key preset stands in the block data; it belongs to engine"),
        ("preset: zero2", "it is a key of the block engine"),
        ("training: 3", "expected keys with values"),
        ("[1, 2]", "expected blocks"),
        ("a: [", "not valid YAML"),
        ("training: {max_steps: many}", "invalid int value: 'many'"),
    ],
)
def test_bad_yaml_says_what_is_wrong(tmp_path, text, expected):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        run("--config", str(file))
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


def test_all_problems_of_a_yaml_file_are_reported_together(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("training: {max_stepz: 3}\nmodle: {}\n")
    with pytest.raises(ConfigError, match=r"max_stepz.*modle"):
        run("--config", str(file))


def test_make_config_takes_flat_names():
    config = make_config(None, DEFAULTS, max_steps=5, preset="zero2")
    assert config.engine.preset == "zero2"
    assert config.data.max_length == 64
    assert config.training_arguments == {"learning_rate": 1e-3, "max_steps": 5}
    with pytest.raises(ConfigError, match="unknown setting max_stepz"):
        make_config(None, DEFAULTS, max_stepz=5)


def test_early_stopping_keeps_the_best_model():
    assert run("--early_stopping_patience", "2").training_arguments["load_best_model_at_end"] is True


def test_help_shows_own_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "The initial learning rate for the optimizer. (default: 0.001)" in shown
    assert "--fsdp " not in shown
