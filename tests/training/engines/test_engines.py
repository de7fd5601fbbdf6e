"""The engine guard without processes: environments, command lines and settings that launchers really make.

tests/distributed/test_engine.py starts the launchers themselves.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist.errors import ConfigError, EngineError
from hf_dist.presets.catalogue import PRESETS, ds_config
from hf_dist.training.engines import lifecycle as engines
from hf_dist.training.engines import needs
from hf_dist.training.engines.conflicts import find_conflicts, refuse_conflicts
from hf_dist.training.engines.launch import effective_preset, launch_line, launch_problems
from hf_dist.training.engines.running import Engine, check_engine

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
LAUNCH = ["/usr/bin/python", "/usr/bin/accelerate", "launch"]


def problems(preset="none", environ=None, ancestors=()):
    return launch_problems(preset, environ or {}, list(ancestors))


@pytest.mark.parametrize("environ", [{}, TORCHRUN, {**TORCHRUN, "HF_DIST_NPROC": "2"}])
@pytest.mark.parametrize("preset", ["none", "zero2"])
def test_a_plain_start_and_torchrun_are_fine(preset, environ):
    assert problems(preset, environ) == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({key: TORCHRUN[key] for key in TORCHRUN if key != "MASTER_PORT"}, "MASTER_PORT is not"),
        ({**TORCHRUN, "RANK": "2"}, "ranks count from 0"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "each would train alone"),
    ],
)
def test_ranks_set_by_half_are_refused(environ, said):
    (problem,) = problems("none", environ)
    assert said in problem


def test_restarts_need_a_store_of_their_own():
    told = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
    (problem,) = problems("none", {**told, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in problem
    assert problems("none", {**told, "TORCHELASTIC_USE_AGENT_STORE": "False"}) == []
    assert problems("none", {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == []


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_deepspeed_on_accelerates_cpu_flag_is_refused(value):
    (problem,) = problems("zero2", {"ACCELERATE_USE_CPU": value})
    assert "drop DeepSpeed" in problem
    assert problems("none", {"ACCELERATE_USE_CPU": value}) == []
    assert problems("none", {"ACCELERATE_USE_CPU": value, "ACCELERATE_USE_DEEPSPEED": "true"}) != []


def test_fsdp_is_refused():
    (problem,) = problems("none", {"ACCELERATE_USE_FSDP": "true"})
    assert "--preset zero3" in problem


@pytest.mark.parametrize(
    ("command", "started", "refused"),
    [
        ([*LAUNCH, "--cpu", "--num_processes", "2", "train.py"], {}, True),
        ([*LAUNCH, "--cpu", "--num-processes=2", "train.py"], {}, True),
        (["accelerate-launch", "--num_processes", "2", "train.py"], {}, True),
        (["python", "-m", "accelerate.commands.launch", "--num_processes", "2", "train.py"], {}, True),
        ([*LAUNCH, "--num_processes", "2", "train.py"], TORCHRUN, False),
        ([*LAUNCH, "--num_processes", "1", "train.py"], {}, False),
        ([*LAUNCH, "train.py"], {}, False),
        # These are flags of the script, not of the launcher.
        ([*LAUNCH, "train.py", "--num_processes", "2"], {}, False),
        (["vim", "launch", "accelerate.txt"], {}, False),
    ],
)
def test_processes_that_accelerate_dropped_are_found(command, started, refused):
    found = problems("none", started, [["bash"], command])
    assert bool(found) == refused
    assert all("asked for 2 processes, but started 1" in problem for problem in found)


def test_processes_that_an_accelerate_config_asks_for_are_found(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true\n")
    (problem,) = problems("none", {}, [[*LAUNCH, "--config_file", str(file), "train.py"]])
    assert "asked for 2 processes" in problem


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HF_DIST_NPROC": "2"}, "asks for 2 processes, but the launcher started 1"),
        ({**TORCHRUN, "HF_DIST_NPROC": "4"}, "asks for 4 processes, but the launcher started 2"),
        ({"HF_DIST_NPROC": "all"}, "expected the number"),
    ],
)
def test_the_count_in_the_environment_is_compared(environ, said):
    (problem,) = problems("none", environ)
    assert said in problem


def test_two_nodes_count_their_own_processes():
    environ = {**TORCHRUN, "WORLD_SIZE": "4", "HF_DIST_NPROC": "2"}
    assert problems("none", environ) == []


def test_what_accelerate_asks_for_counts_without_a_preset(tmp_path):
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert effective_preset("none", {}) == "none"
    assert effective_preset("none", deepspeed) == "zero2"  # accelerate's own default stage
    assert effective_preset("none", {**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}) == "zero3"
    offload = {
        **deepspeed,
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    }
    assert effective_preset("none", offload) == "zero2_offload"
    assert effective_preset("zero1", offload) == "zero1"
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps(ds_config("zero3")))
    assert effective_preset("none", {**deepspeed, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == "zero3"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert effective_preset("none", {**deepspeed, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == str(file)


def test_the_launch_line_names_the_count_the_script_and_the_preset():
    assert launch_line("none", 2, "train.py") == (
        "HF_DIST_NPROC=2 torchrun --standalone --nproc_per_node 2 train.py"
    )
    assert launch_line("my configs/a.json", 4, "train.py").endswith("train.py --preset 'my configs/a.json'")


# --- settings that contradict each other


def conflicts(preset, arguments=None, environ=None, **options):
    return find_conflicts(preset, arguments or {}, environ or {}, on_cpu=True, **options)


@pytest.fixture
def own(tmp_path):
    def write(name="mine.json", **changes):
        config = {**ds_config("zero2"), **changes}
        file = tmp_path / name
        file.write_text(json.dumps(config))
        return str(file)

    return write


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


# --- what the machine lacks


def test_a_compiler_is_needed_for_offload(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    environ = {**os.environ, "CXX": "no-such-compiler"}
    (problem,) = needs.missing_needs(ds_config("zero2_offload"), environ, on_cpu=True)
    assert "'no-such-compiler' is not there" in problem and "apt-get install g++" in problem
    assert needs.missing_needs(ds_config("zero2"), environ, on_cpu=True) == []


def test_ninja_of_an_environment_that_is_not_activated_is_found(tmp_path, monkeypatch):
    programs = tmp_path / "venv"
    programs.mkdir()
    (programs / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    environ = {"PATH": str(tmp_path)}
    needs.show_own_ninja(environ)
    assert environ["PATH"] == f"{tmp_path}{os.pathsep}{programs}"
    with_one = {"PATH": str(programs)}
    needs.show_own_ninja(with_one)
    assert with_one["PATH"] == str(programs)


def test_libaio_is_needed_for_nvme(monkeypatch, tmp_path):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(needs, "_has_libaio", lambda: False)
    found = needs.missing_needs(ds_config("zero3_nvme", nvme_path=str(tmp_path)), os.environ, on_cpu=True)
    assert len(found) == 1 and "libaio-dev" in found[0]


def test_the_nvme_folder_must_be_writable(tmp_path):
    assert needs.nvme_path_problems(str(tmp_path / "new" / "folder")) == []
    (tmp_path / "file").write_text("")
    (problem,) = needs.nvme_path_problems(str(tmp_path / "file"))
    assert "can't write" in problem and "HF_DIST_NVME_PATH" in problem
    (problem,) = needs.nvme_path_problems("/proc/nowhere")
    assert "can't write" in problem
    (problem,) = needs.nvme_path_problems("/local_nvme")
    assert "doesn't exist" in problem and "HF_DIST_NVME_PATH" in problem


def test_the_disk_must_hold_the_model(tmp_path):
    config = ds_config("zero3_nvme", nvme_path=str(tmp_path))
    assert needs.nvme_space_problem(config, 1000) is None
    # 20 bytes each: master weight, two moments, gradient, parameter
    assert "needs 20000000.0 GB" in str(needs.nvme_space_problem(config, 10**15))
    assert needs.nvme_space_problem(ds_config("zero3"), 10**15) is None


def _lock(folder: Path, *, built: bool, age: float) -> Path:
    from torch.utils import cpp_extension

    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    lock = Path(cpp_extension._get_build_directory("cpu_adam", verbose=False), "lock")
    lock.write_text("")
    os.utime(lock, (time.time() - age,) * 2)
    if built:
        lock.with_name("cpu_adam.so").write_text("")
    return lock


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_a_fresh_lock_is_respected(extensions):
    lock = _lock(extensions, built=True, age=5)
    assert needs.stale_locks(["cpu_adam"]) == [] and lock.exists()


def test_a_stale_lock_beside_a_built_library_is_removed(extensions):
    lock = _lock(extensions, built=True, age=100)
    assert needs.stale_locks(["cpu_adam"]) == [] and not lock.exists()


def test_a_stale_lock_without_a_library_is_reported(extensions):
    assert needs.stale_locks(["cpu_adam"]) == []
    lock = _lock(extensions, built=False, age=100)
    assert needs.stale_locks(["cpu_adam"]) == []
    lock = _lock(extensions, built=False, age=1000)
    (problem,) = needs.stale_locks(["cpu_adam"])
    assert f"rm {lock}" in problem and lock.exists()


def test_a_lock_that_a_process_holds_is_respected(extensions):
    lock = _lock(extensions, built=True, age=1000)
    lock.unlink()
    # As torch takes it, in a process that then compiles for long.
    code = (
        "import sys; from torch.utils.file_baton import FileBaton; "
        f"assert FileBaton({str(lock)!r}).try_acquire(); print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        os.utime(lock, (time.time() - 1000,) * 2)
        assert needs.stale_locks(["cpu_adam"]) == [] and lock.exists()
    finally:
        holder.kill()
        holder.communicate()
    assert needs.stale_locks(["cpu_adam"]) == [] and not lock.exists()


# --- getting ready, and the comparison


def test_one_process_becomes_a_group_of_one_for_deepspeed():
    environ: dict[str, str] = {}
    engines.prepare_environment("zero2", environ)
    assert {environ[name] for name in ("RANK", "LOCAL_RANK")} == {"0"}
    assert environ["WORLD_SIZE"] == "1" and int(environ["MASTER_PORT"]) > 0
    engines.prepare_environment("zero2", environ)
    bare: dict[str, str] = {}
    engines.prepare_environment("none", bare)
    assert "RANK" not in bare


def test_a_users_json_is_linted_at_the_start(own):
    with pytest.raises(ConfigError, match="grad_clipping.*use gradient_clipping"):
        engines.prepare_environment(own(grad_clipping=1), {})
    engines.prepare_environment(own(), {})


def test_problems_come_with_the_line_that_works():
    with pytest.raises(EngineError, match=r"What works: HF_DIST_NPROC=2 torchrun .* --preset zero2"):
        engines.prepare_environment("zero2", {"WORLD_SIZE": "2"})


def test_user_settings_of_ddp_stay():
    assert engines.training_argument_overrides("none")["ddp_find_unused_parameters"] is False
    given = {"ddp_find_unused_parameters": True}
    assert "ddp_find_unused_parameters" not in engines.training_argument_overrides("none", given)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (Engine(kind="single"), "single"),
        (Engine(kind="ddp", world_size=2), "ddp"),
        (Engine(kind="deepspeed", zero_stage=2), "deepspeed-zero2"),
        (Engine(kind="deepspeed", zero_stage=2, offload_optimizer="cpu"), "deepspeed-zero2-offload"),
        (
            Engine(kind="deepspeed", zero_stage=3, offload_optimizer="nvme", offload_param="cpu"),
            "deepspeed-zero3-nvme",
        ),
        (Engine(kind="deepspeed", zero_stage=3, hpz_size=4), "deepspeed-zero3-hpz"),
    ],
)
def test_names_of_engines(engine, name):
    assert engine.name == name


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine(kind="ddp", world_size=2, data_parallel_size=2), "kind is ddp instead of deepspeed"),
        (Engine(kind="deepspeed", zero_stage=2, world_size=2, data_parallel_size=2), "zero_stage is 2"),
        (
            Engine(
                kind="deepspeed", zero_stage=3, offload_optimizer="cpu", world_size=2, data_parallel_size=2
            ),
            "offload_optimizer is cpu instead of none",
        ),
        (Engine(kind="deepspeed", zero_stage=3), "world_size is 1 instead of 2"),
    ],
)
def test_another_engine_is_an_error_with_the_line_that_works(engine, said):
    with pytest.raises(EngineError) as caught:
        check_engine("zero3", engine, TORCHRUN)
    message = str(caught.value)
    assert said in message
    assert "torchrun --standalone --nproc_per_node 2" in message and "--preset zero3" in message


def test_the_right_engine_passes_and_the_precision_counts():
    engine = Engine(kind="deepspeed", zero_stage=3, world_size=2, data_parallel_size=2)
    check_engine("zero3", engine, TORCHRUN, {"bf16": False})
    with pytest.raises(EngineError, match="precision is fp32 instead of bf16"):
        check_engine("zero3", engine, TORCHRUN, {"bf16": True})
