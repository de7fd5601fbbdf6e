"""The lint of a DeepSpeed JSON, against what DeepSpeed, the Trainer and accelerate really do with it."""

import copy
import json

import pytest

from hf_dist.presets.catalogue import ds_config
from hf_dist.presets.deepspeed_keys import KEYS, VERSION
from hf_dist.presets.lint import DEAD, FILLED, lint


def kinds(config, file=None):
    return {(finding.kind, finding.path) for finding in lint(config, file=file)}


def zero(**values):
    return {"zero_optimization": {"stage": 2, **values}}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_the_table_is_what_the_installed_deepspeed_reads():
    import deepspeed

    from tests.presets.deepspeed_classes import derive

    assert deepspeed.__version__ == VERSION, "mend: python -m tests.presets.deepspeed_classes"
    assert derive() == KEYS


def test_deprecated_keys_of_deepspeed_are_known_as_dead():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from tests.presets.deepspeed_classes import deprecated

    theirs = deprecated(DeepSpeedZeroConfig)
    assert theirs
    for key, replacement in theirs.items():
        message = DEAD[f"zero_optimization.{key}"]
        assert any(word in message for word in replacement.split(" or ")), (key, replacement, message)


def test_removed_keys_of_deepspeed_are_known_as_dead():
    from deepspeed.runtime import config

    for key in config._REMOVED_TOP_LEVEL_CONFIG_KEYS:
        assert key in DEAD
    for key in config._REMOVED_ZERO_CONFIG_KEYS:
        assert f"zero_optimization.{key}" in DEAD


@pytest.mark.parametrize("path", sorted(DEAD))
def test_no_dead_key_is_in_the_table_of_living_ones(path):
    table = KEYS
    *parents, key = path.split(".")
    for parent in parents:
        table = table[parent] if isinstance(table.get(parent), dict) else {}
    assert key not in table


@pytest.mark.parametrize(
    ("config", "kind", "path"),
    [
        ({"grad_clipping": 1.0, **zero()}, "dead key", "grad_clipping"),
        ({"gradient_cliping": 1.0, **zero()}, "unknown key", "gradient_cliping"),
        (zero(stages=3), "unknown key", "zero_optimization.stages"),
        (
            zero(offload_optimizer={"device": "cpu", "pinmemory": True}),
            "unknown key",
            "zero_optimization.offload_optimizer.pinmemory",
        ),
        (zero(cpu_offload=True), "dead key", "zero_optimization.cpu_offload"),
        ({"bf16": {"enabled": True, "loss_scale": 0}, **zero()}, "dead key", "bf16.loss_scale"),
        (zero(stage="2"), "number as text", "zero_optimization.stage"),
        (zero(reduce_bucket_size="5e8"), "number as text", "zero_optimization.reduce_bucket_size"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "3e-5"}}, **zero()},
            "number as text",
            "optimizer.params.lr",
        ),
        (zero(reduce_bucket_size=5e8), "float for integer", "zero_optimization.reduce_bucket_size"),
        (zero(allgather_bucket_size=0.5), "float for integer", "zero_optimization.allgather_bucket_size"),
        (zero(allgather_bucket_size="auto"), "unfilled auto", "zero_optimization.allgather_bucket_size"),
        ({"fp16": {"initial_scale_power": "auto"}, **zero()}, "unfilled auto", "fp16.initial_scale_power"),
        (zero(overlap_comm="true"), "wrong type", "zero_optimization.overlap_comm"),
        ({"zero_optimization": True}, "wrong type", "zero_optimization"),
        ({"train_batch_size": 8}, "contradiction", "zero_optimization"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}, **zero()},
            "contradiction",
            "fp16.enabled",
        ),
        (zero(stage=3), "no whole model", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
        (zero(stage3_prefetch_bucket_size=10), "no effect", "zero_optimization.stage3_prefetch_bucket_size"),
        (zero(offload_optimizer={"device": "nvme"}), "contradiction", "zero_optimization.offload_optimizer"),
        (
            zero(offload_optimizer={"device": "disk"}),
            "wrong type",
            "zero_optimization.offload_optimizer.device",
        ),
    ],
)
def test_each_kind_of_mistake_is_found(config, kind, path):
    assert (kind, path) in kinds(config)


def test_all_mistakes_are_found_at_once():
    config = {"grad_clipping": 1, "stage": 3, "train_batch_size": "16", **zero(foo=1, cpu_offload=True)}
    found = [finding.path for finding in lint(config) if finding.error]
    assert found == [
        "grad_clipping",
        "stage",
        "train_batch_size",
        "zero_optimization.foo",
        "zero_optimization.cpu_offload",
    ]


def test_a_key_at_the_wrong_depth_is_told_its_place():
    (finding,) = lint({"offload_optimizer": {"device": "cpu"}, **zero()})
    assert "belongs at zero_optimization.offload_optimizer" in finding.message


def test_a_misspelt_key_is_told_the_nearest():
    (finding,) = lint(zero(reduce_bucket_sise=5))
    assert "did you mean reduce_bucket_size?" in finding.message


def test_comments_at_the_top_are_left_alone():
    assert lint({"_comment": "ours", **zero()}) == []


def test_auto_where_it_is_a_value_is_left_alone():
    config = {"data_types": {"keep_in_fp32_modules": "auto"}, **zero(zenflow={"select_strategy": "auto"})}
    assert lint(config) == []


@pytest.mark.parametrize(
    ("stem", "config", "said"),
    [
        ("zero2", zero(stage=1), "promises stage 2"),
        ("ds_z3_config", zero(), "promises stage 3"),
        ("deepspeed_config_s3", zero(), "promises stage 3"),
        ("zero_stage_3", zero(), "promises stage 3"),
        ("zero2", zero(offload_optimizer={"device": "cpu"}), "doesn't say so"),
        ("zero2_no_offload", zero(offload_optimizer={"device": "cpu"}), "doesn't say so"),
        ("zero2_offload", zero(), "offloads nothing"),
        ("zero2_offload", zero(offload_optimizer={"device": "none"}), "offloads nothing"),
    ],
)
def test_a_name_is_a_promise(stem, config, said):
    (finding,) = lint(config, file=f"some/where/{stem}.json")
    assert said in finding.message
    assert finding.kind == "name" and not finding.error


@pytest.mark.parametrize("stem", ["ds_config", "zero2", "my_zero2_bf16", "stage2", "gpus2_zero2", "z2-nocpu"])
def test_a_name_that_holds_is_left_alone(stem):
    assert lint(zero(), file=f"{stem}.json") == []


def _with_auto_everywhere():
    """Every number and switch of the table at "auto", over what is needed to get through."""

    def auto(table):
        return {
            key: auto(kind) if isinstance(kind, dict) else "auto"
            for key, kind in table.items()
            if kind != "any" or key == "params"
        }

    config = {name: auto(KEYS[name]) for name in ("zero_optimization", "bf16", "fp16")}
    config["zero_optimization"].update(stage=3, offload_optimizer={"device": "none"}, offload_param=None)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = "auto"
    config["gradient_clipping"] = "auto"
    adam = {name: "auto" for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
    config["optimizer"] = {"type": "AdamW", "params": adam}
    warmup = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type")
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {name: "auto" for name in warmup}}
    return config


def _paths_with_auto(config, parent=""):
    for key, value in config.items():
        path = f"{parent}.{key}" if parent else key
        if isinstance(value, dict):
            yield from _paths_with_auto(value, path)
        elif value == "auto":
            yield path


def test_auto_is_filled_exactly_where_the_trainer_fills_it(tmp_path):
    import transformers
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    config = _with_auto_everywhere()
    before = set(_paths_with_auto(config))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), deepspeed=copy.deepcopy(config), use_cpu=True, report_to=[]
    )
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=10, hidden_size=32, num_hidden_layers=1, num_attention_heads=1)
    )
    arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, 10)
    unset_hf_deepspeed_config()
    after = set(_paths_with_auto(arguments.hf_deepspeed_config.config))
    filled = before - after
    # accelerate fills this one too, with False: the one "auto" that loses the model.
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    assert filled == FILLED | {gather}
    assert arguments.hf_deepspeed_config.config["zero_optimization"][gather.split(".")[1]] is False
    flagged = {finding.path for finding in lint(config) if finding.kind == "unfilled auto"}
    assert flagged == (after | {gather}) - {"zero_optimization.zenflow.select_strategy"}


def test_deepspeed_agrees_that_unknown_top_level_keys_are_ignored_and_nested_ones_are_not():
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig({"train_batch_size": 1, "grad_clipping": 1.0})
    with pytest.raises(Exception, match="Extra inputs"):
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 2, "foo": 1}})


def test_a_text_stage_really_loses_zero_init(tmp_path):
    """Why a number as text is an error: DeepSpeed takes "3" for 3, transformers doesn't."""
    from transformers.integrations.deepspeed import (
        HfDeepSpeedConfig,
        is_deepspeed_zero3_enabled,
        unset_hf_deepspeed_config,
    )

    config = json.loads(json.dumps(ds_config("zero3")))
    config["zero_optimization"]["stage"] = "3"
    kept = HfDeepSpeedConfig(config)
    assert not is_deepspeed_zero3_enabled()
    del kept
    unset_hf_deepspeed_config()
