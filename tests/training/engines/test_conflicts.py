"""Settings that contradict each other."""

import json

import pytest

from hf_dist.errors import ConfigError
from hf_dist.presets.catalogue import PRESETS, ds_config
from hf_dist.training.engines import lifecycle as engines
from hf_dist.training.engines.conflicts import find_conflicts, refuse_conflicts
from tests.training.engines.environments import TORCHRUN


def conflicts(preset, arguments=None, environ=None, **options):
    return find_conflicts(preset, arguments or {}, environ or {}, on_cpu=True, **options)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_presets_conflict_with_nothing(preset):
    assert conflicts(preset, {"learning_rate": 1.0, "max_grad_norm": 0.1, "bf16": True}) == []


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        (
            {"gradient_clipping": 0.5},
            {},
            ["gradient_clipping is 0.5", "--max_grad_norm is 1.0 (its default)"],
        ),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 2.0}, ["--max_grad_norm is 2.0;"]),
        ({"train_micro_batch_size_per_gpu": 4}, {}, ["--per_device_train_batch_size is 8 (its default)"]),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}, ["is 4", "is 2"]),
        ({"bf16": {"enabled": True}}, {}, ["bf16.enabled is True", "--bf16 is"]),
        ({"train_batch_size": 64}, {"per_device_train_batch_size": 4}, ["train_batch_size is 64", "are 4"]),
        ({"optimizer": {"type": "AdamW"}}, {}, ["has optimizer", "--optim_from_json"]),
        (
            {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}},
            {},
            ["has optimizer and scheduler"],
        ),
    ],
)
def test_a_json_against_training_arguments(own, changes, arguments, said):
    file = own(**changes)
    (conflict,) = conflicts(file, arguments)
    assert file in conflict
    assert all(words in conflict for words in said), conflict


def test_values_that_agree_are_no_conflict(own):
    file = own(
        gradient_clipping=1,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2,
        train_batch_size=16,
    )
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert conflicts(file, arguments, TORCHRUN) == []


def test_all_conflicts_are_found_at_once(own):
    file = own(gradient_clipping=0.5, train_batch_size=1, optimizer={"type": "Adam"})
    found = conflicts(file, {"fp16": True, "fsdp": "full_shard", "optim": "adafactor"})
    assert len(found) == 5
    with pytest.raises(ConfigError, match="5 conflicts"):
        refuse_conflicts(file, {"fp16": True, "fsdp": "full_shard"}, environ={}, on_cpu=True)


def test_the_optimizer_of_the_json_on_request(own):
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}}
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": "auto"}}
    file = own(optimizer=adam, scheduler=warmup)
    assert conflicts(file, optim_from_json=True) == []
    overrides = engines.training_argument_overrides(file, optim_from_json=True)
    assert {key: value for key, value in overrides.items() if key not in ("deepspeed", "use_cpu")} == {
        "learning_rate": 1e-4,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "warmup_steps": 7,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
    }
    (conflict,) = conflicts("zero2", optim_from_json=True)
    assert "has no optimizer" in conflict


def test_offload_runs_only_deepspeeds_cpu_optimizers():
    (conflict,) = conflicts("zero2_offload", {"optim": "adafactor"})
    assert "--optim is adafactor" in conflict
    assert conflicts("zero2", {"optim": "adafactor"}) == []


@pytest.mark.parametrize("arguments", [{"fsdp": "full_shard"}, {"fsdp_config": {"version": 2}}])
def test_fsdp_flags_are_refused(arguments):
    (conflict,) = conflicts("none", arguments)
    assert "doesn't run FSDP yet" in conflict


def test_precisions(own):
    assert "no accelerator" in conflicts("none", {"fp16": True})[0]
    assert "no accelerator" in " ".join(conflicts(own(fp16={"enabled": True}), {"fp16": False}))
    (conflict,) = conflicts("zero2", {}, {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert "mixed_precision is bf16" in conflict
    assert conflicts("zero2", {"bf16": True}, {"ACCELERATE_MIXED_PRECISION": "bf16"}) == []


def test_zero_without_training():
    (conflict,) = conflicts("zero2", {"do_eval": True})
    assert "--preset none" in conflict
    assert conflicts("zero3", {"do_eval": True}) == []
    assert conflicts("zero2", {"do_eval": True, "do_train": True}) == []
    assert conflicts("none", {"do_predict": True}) == []


def test_checkpointing_is_not_reentrant_unless_asked():
    """Left to transformers' own default; this fails when that moves."""
    import transformers

    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=10, hidden_size=32, num_hidden_layers=1, num_attention_heads=1)
    )
    model.gradient_checkpointing_enable()
    layer = model.encoder.layer[0]
    function = getattr(layer, "_activation_checkpointing_func", None) or layer._gradient_checkpointing_func
    assert function.keywords["use_reentrant"] is False


def test_a_static_graph_with_accumulation_is_refused():
    arguments = {"ddp_static_graph": True, "gradient_accumulation_steps": 2}
    assert "static graph" in conflicts("none", arguments)[0]
    assert conflicts("none", {"ddp_static_graph": True}) == []


def test_accelerates_file_against_the_preset(tmp_path):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(ds_config("zero3_offload")))
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    found = conflicts("zero2", {}, environ)
    assert len(found) == 3
    assert f"ZeRO stage is 2 in preset 'zero2', but 3 in {file}" in found[0]
    assert conflicts("zero3_offload", {}, environ) == []


def test_accelerates_default_stage_is_nobodys_wish():
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert conflicts("zero3", {}, environ) == []
    named = {**environ, "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,zero3_init_flag"}
    assert "the accelerate config" in conflicts("zero3", {}, named)[0]


def test_accelerates_accumulation_and_clipping():
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    }
    found = conflicts("none", {}, environ)
    assert [conflict.split(" is ")[0] for conflict in found] == [
        "accelerate's gradient_accumulation_steps",
        "accelerate's gradient_clipping",
    ]
    assert conflicts("none", {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5}, environ) == []
