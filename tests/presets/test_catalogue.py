"""Presets: what the generated files say, and what DeepSpeed, accelerate and the Trainer make of them."""

import json
import logging
import warnings
from pathlib import Path

import pytest
import yaml

from hf_dist.errors import ConfigError
from hf_dist.presets import catalogue
from hf_dist.presets.catalogue import PRESETS, ds_config, resolve
from hf_dist.presets.lint import lint
from hf_dist.presets.reading import hpz_size, nvme_paths

ROOT = Path(__file__).parents[2]
DEEPSPEED = [name for name in PRESETS if name != "none"]


def test_checked_in_files_are_what_the_code_generates():
    generated = catalogue.generated_files("ds_configs")
    on_disk = {
        path.relative_to(ROOT / "ds_configs").as_posix(): path.read_bytes()
        for path in (ROOT / "ds_configs").rglob("*")
        if path.is_file()
    }
    assert {name: text.encode() for name, text in generated.items()} == on_disk


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "param"),
    [
        ("none", None, "none", "none"),
        ("zero1", 1, "none", "none"),
        ("zero2", 2, "none", "none"),
        ("zero2_offload", 2, "cpu", "none"),
        ("zero3", 3, "none", "none"),
        ("zero3_offload", 3, "cpu", "cpu"),
        ("zero3_nvme", 3, "nvme", "nvme"),
        ("zero3_hpz", 3, "none", "none"),
    ],
)
def test_a_preset_does_what_its_name_promises(name, stage, optimizer, param):
    preset = PRESETS[name]
    assert (preset.zero_stage, preset.offload_optimizer, preset.offload_param) == (stage, optimizer, param)
    assert preset.choose and preset.costs and preset.needs


@pytest.mark.parametrize("name", DEEPSPEED)
def test_the_own_lint_finds_nothing_in_a_preset(name):
    assert lint(ds_config(name), file=f"{name}.json") == []


def test_a_config_is_a_fresh_copy():
    ds_config("zero3")["zero_optimization"]["stage"] = 0
    ds_config("zero3_nvme", nvme_path="/elsewhere")
    assert ds_config("zero3")["zero_optimization"]["stage"] == 3
    assert nvme_paths(ds_config("zero3_nvme")) == [catalogue.NVME_PATH]


def test_the_nvme_path_can_be_named():
    assert nvme_paths(ds_config("zero3_nvme", nvme_path="/disk")) == ["/disk"]
    assert nvme_paths(resolve("zero3_nvme", nvme_path="/disk")) == ["/disk"]


def test_hierarchical_groups_are_as_large_as_a_node():
    sizes = {hpz_size(ds_config("zero3_hpz", processes_per_node=n)) for n in (1, 2, 4)}
    assert sizes == {1, 2, 4}
    assert hpz_size(ds_config("zero3", processes_per_node=4)) == 1


def test_an_unknown_preset_names_the_nearest_and_all():
    with pytest.raises(ConfigError) as caught:
        resolve("zero2_ofload")
    message = str(caught.value)
    assert "did you mean zero2_offload?" in message
    assert all(name in message for name in PRESETS)


def test_a_json_of_the_users_own_is_read_as_it_is(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    assert resolve(str(file)) == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,}', "line 1"),
        ("[1]", "a list"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "'stage' twice"),
    ],
)
def test_a_json_that_is_none_is_refused_with_the_place(tmp_path, text, said):
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        resolve(str(file))


def test_a_missing_json_is_refused():
    with pytest.raises(ConfigError, match=r"nowhere\.json can't be read"):
        resolve("nowhere.json")


@pytest.fixture
def deepspeed_log(monkeypatch):
    """The messages that DeepSpeed logs at the level of a warning or above."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.utils import logger

    records: list[str] = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def _filled_by_the_trainer(config, folder, **arguments):
    """The config after TrainingArguments and the Trainer have put values in the place of "auto"."""
    import transformers

    training = transformers.TrainingArguments(
        output_dir=str(folder), deepspeed=config, use_cpu=True, report_to=[], **arguments
    )
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=10, hidden_size=32, num_hidden_layers=1, num_attention_heads=1)
    )
    training.hf_deepspeed_config.trainer_config_finalize(training, model, 10)
    return training.hf_deepspeed_config.config


@pytest.mark.parametrize("name", DEEPSPEED)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_deepspeed_parses_every_generated_file_without_a_warning(name, precision, tmp_path, deepspeed_log):
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    filled = _filled_by_the_trainer(config, tmp_path, **precision)
    unset_hf_deepspeed_config()
    assert "auto" not in json.dumps(filled)

    from deepspeed.runtime.config import DeepSpeedConfig

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parsed = DeepSpeedConfig(filled)
    assert deepspeed_log == []
    zero = parsed.zero_config
    assert zero.stage == PRESETS[name].zero_stage
    assert (zero.offload_optimizer.device if zero.offload_optimizer else "none") == PRESETS[
        name
    ].offload_optimizer
    assert (zero.offload_param.device if zero.offload_param else "none") == PRESETS[name].offload_param
    assert parsed.bfloat16_config.enabled == bool(precision)
    if zero.stage == 3:
        assert zero.gather_16bit_weights_on_model_save


def test_the_log_fixture_hears_a_deprecation(deepspeed_log):
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert any("deprecated" in message for message in deepspeed_log)


@pytest.mark.parametrize("name", PRESETS)
def test_accelerate_reads_its_config(name):
    from accelerate.commands.config.config_args import load_config_from_file

    path = ROOT / "ds_configs" / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == -1
    if name == "none":
        assert config.distributed_type.value == "MULTI_GPU"
    else:
        assert config.deepspeed_config["deepspeed_config_file"] == f"ds_configs/{name}.json"
        zero3_init = yaml.safe_load(path.read_text())["deepspeed_config"]["zero3_init_flag"]
        assert zero3_init == (PRESETS[name].zero_stage == 3)
