"""docs/stock_flags.md is walked row by row through the parsers of the recipes."""

import functools
import importlib
import os
import re
import shlex
from pathlib import Path

import pytest

from hf_dist.errors import ConfigError
from hf_dist.training.flags import parsing
from hf_dist.training.flags.parsing import make_config, parse
from hf_dist.training.flags.stock.translate import STOCK

ROOT = Path(__file__).parents[3]
TASKS = {
    "causal_lm": "CausalLM",
    "masked_lm": "MaskedLM",
    "question_answering": "QuestionAnswering",
    "summarization": "Summarization",
    "text_classification": "TextClassification",
    "token_classification": "TokenClassification",
    "translation": "Translation",
}


def task_of(recipe):
    return getattr(importlib.import_module(f"recipes.{recipe}"), TASKS[recipe])


@functools.cache
def run(recipe, *words):
    defaults = importlib.import_module(f"recipes.{recipe}").DEFAULTS
    return parse(words, recipe=recipe, defaults=defaults, settings_class=task_of(recipe).settings_class)


def documented():
    """(recipes, their flags, the cell of ours) of each row of the table."""
    text = (ROOT / "docs" / "stock_flags.md").read_text()
    table = text.split("| Stock flag | Recipes | Ours | What happens |\n")[1]
    rows = []
    for line in table.splitlines()[1:]:
        theirs, recipes, ours, _ = (cell.strip() for cell in line.strip().strip("|").split(" | "))
        names = list(TASKS) if recipes == "all" else re.findall(r"`(\w+)`", recipes)
        rows.append((names, theirs.strip("`"), ours))
    return rows


ROWS = documented()


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    # Set and unset, so that what a test sets is taken back.
    monkeypatch.setenv("HF_TOKEN", "")


@pytest.mark.parametrize(("recipes", "theirs", "ours"), ROWS, ids=[row[1] for row in ROWS])
def test_what_the_docs_say_of_a_stock_flag_is_what_the_parser_does(recipes, theirs, ours):
    words = shlex.split(theirs)
    flag = words[0].split("=")[0]
    # One recipe stands for all that have the flag, another one in each row.
    for recipe in recipes[ROWS.index((recipes, theirs, ours)) % len(recipes) :][:1]:
        if ours == "refused":
            with pytest.raises(ConfigError, match=f"^{flag}[^;]* can't be set: ."):
                run(recipe, *words)
            continue
        config = run(recipe, *words)
        if ours == "no effect":
            expected = run(recipe)
        elif ours == "`HF_TOKEN` in the environment":
            expected = run(recipe)
            assert os.environ["HF_TOKEN"] == words[1]
            assert not any(words[1] in note for note in config.notes)
        else:
            expected = run(recipe, *shlex.split(ours.strip("`")))
            # Else the row would show nothing ("auto" is the default).
            assert expected != run(recipe) or "--resume auto" in ours
        assert config == expected
        named = [note for note in config.notes if note.startswith(flag)]
        if flag not in ("--save_steps", "--eval_steps", "--logging_steps", "--overwrite_output_dir"):
            assert len(named) == 1, config.notes


def test_the_docs_name_every_stock_flag():
    shown = {word.split("=")[0] for _, theirs, _ in ROWS for word in theirs.split() if word.startswith("--")}
    assert {f"--{one.name}" for one in STOCK} <= shown


# The arguments of the scripts, as their ModelArguments and DataTrainingArguments were from 2020 to
# transformers 5, and of TrainingArguments 4.12, 4.41 and 4.57 those that 5.24 has no more.
_MODEL = "model_name_or_path config_name tokenizer_name cache_dir use_fast_tokenizer model_revision \
    use_auth_token token trust_remote_code"
_DATA = "dataset_name dataset_config_name train_file validation_file overwrite_cache max_train_samples \
    max_eval_samples max_val_samples preprocessing_num_workers"
_TEST = "test_file max_predict_samples max_test_samples"
_SEQ2SEQ = f"{_TEST} max_source_length max_target_length val_max_target_length pad_to_max_length num_beams \
    ignore_pad_token_for_loss source_prefix forced_bos_token sortish_sampler predict_with_generate \
    generation_max_length generation_num_beams generation_config"
_LANGUAGE = (
    "model_type config_overrides torch_dtype dtype low_cpu_mem_usage validation_split_percentage streaming"
)
ARGUMENTS = {
    "run_glue": f"task_name max_seq_length pad_to_max_length ignore_mismatched_sizes {_TEST}",
    "run_classification": f"do_regression text_column_names text_column_delimiter train_split_name {_TEST} \
        validation_split_name test_split_name remove_splits remove_columns label_column_name max_seq_length \
        pad_to_max_length shuffle_train_dataset shuffle_seed metric_name ignore_mismatched_sizes",
    "run_ner": f"task_name text_column_name label_column_name max_seq_length pad_to_max_length \
        label_all_tokens return_entity_level_metrics ignore_mismatched_sizes {_TEST}",
    "run_qa": f"max_seq_length pad_to_max_length version_2_with_negative null_score_diff_threshold \
        doc_stride n_best_size max_answer_length {_TEST}",
    "run_summarization": f"{_SEQ2SEQ} lang text_column summary_column resize_position_embeddings",
    "run_translation": f"{_SEQ2SEQ} source_lang target_lang",
    "run_clm": f"{_LANGUAGE} block_size keep_linebreaks",
    "run_mlm": f"{_LANGUAGE} max_seq_length mlm_probability line_by_line pad_to_max_length",
}
REMOVED = (
    "overwrite_output_dir evaluation_strategy per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio \
    logging_dir no_cuda fp16_opt_level fp16_backend xpu_backend tpu_num_cores tpu_metrics_debug past_index \
    sharded_ddp adafactor group_by_length use_legacy_prediction_loop push_to_hub_model_id use_ipex \
    push_to_hub_organization push_to_hub_token mp_parameters save_safetensors use_mps_device jit_mode_eval \
    half_precision_backend fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap include_inputs_for_metrics \
    torchdynamo ray_scope dispatch_batches split_batches include_tokens_per_second"
)
RECIPES = {
    "run_glue": "text_classification",
    "run_classification": "text_classification",
    "run_ner": "token_classification",
    "run_qa": "question_answering",
    "run_summarization": "summarization",
    "run_translation": "translation",
    "run_clm": "causal_lm",
    "run_mlm": "masked_lm",
}


@pytest.mark.parametrize("script", ARGUMENTS)
def test_every_argument_of_a_script_is_known(script):
    settings_class = task_of(RECIPES[script]).settings_class
    # One parser for all: to build one for each name takes seconds.
    parser = parsing._make_parser(parsing._Names(settings_class), script, "", {})
    for name in f"{_MODEL} {_DATA} {ARGUMENTS[script]} {REMOVED}".split():
        assert f"--{name}" in parser._option_string_actions, name
    assert "--max_seq_lenght" not in parser._option_string_actions


def test_booleans_stand_alone_with_a_value_or_with_no():
    for words in (
        ["--pad_to_max_length", "--bf16"],
        ["--pad_to_max_length=False"],
        ["--no_pad_to_max_length"],
    ):
        assert run("masked_lm", *words).notes[0].startswith("--pad_to_max_length")
    assert run("text_classification", "--ignore-mismatched-sizes").model.new_head
    assert run("text_classification", "--ignore_mismatched_sizes", "--do_eval").model.new_head
    with pytest.raises(ConfigError, match="--use_fast_tokenizer False can't be set"):
        run("masked_lm", "--no_use_fast_tokenizer")


def test_a_misspelt_stock_flag_is_an_error_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"unknown flag --max_seq_lenght \(did you mean --max_seq_length\?\)"
    ):
        run("masked_lm", "--max_seq_lenght", "8")
    with pytest.raises(ConfigError, match="unknown flag --n_best_size"):
        run("masked_lm", "--n_best_size", "8")


def test_stock_keys_in_yaml_and_from_python(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {max_seq_length: 32}\n"
        "training: {warmup_ratio: 0.25, per_gpu_train_batch_size: 4}\n"
        "checkpoint: {save_safetensors: true}\n"
    )
    expected = run(
        "text_classification", "--max_length=32", "--warmup_steps=0.25", "--per_device_train_batch_size=4"
    )
    found = run("text_classification", "--config", str(file))
    assert found == expected
    assert (
        sum(note.startswith(("--max_seq", "--warmup", "--per_gpu", "--save_safe")) for note in found.notes)
        == 4
    )
    # A flag overrides the file, whichever of the two names it has.
    assert run("text_classification", "--config", str(file), "--max_length=16").data.max_length == 16
    settings = {"max_seq_length": 32, "warmup_ratio": 0.25, "per_gpu_train_batch_size": 4}
    from recipes.text_classification import DEFAULTS

    assert make_config(task_of("text_classification"), DEFAULTS, **settings) == expected
    with pytest.raises(ConfigError, match="--tpu_num_cores 8 can't be set"):
        make_config(None, {}, tpu_num_cores=8)


def test_a_json_file_in_the_place_of_all_flags(tmp_path):
    file = tmp_path / "args.json"
    file.write_text('{"max_seq_length": 32, "learning_rate": 2e-05, "do_train": true, "test_file": null}')
    assert run("masked_lm", str(file)) == run(
        "masked_lm", "--max_length=32", "--learning_rate=2e-5", "--do_train"
    )
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected one object"):
        run("masked_lm", str(tmp_path / "list.json"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max_seq_length 8 --max_length 9", "--max_seq_length 8 and --max_length 9 are the same setting"),
        ("--max_seq_length 8 --max_source_length 9", "are the same setting (--max_length) and differ"),
        ("--warmup_ratio 0.1 --warmup_steps 100", "are the same setting (--warmup_steps)"),
        ("--warmup_ratio 1.5", "--warmup_ratio 1.5: it must be at least 0 and less than 1"),
        ("--validation_split_percentage 0", "it must lie between 0 and 100"),
        ("--max_steps 5 --num_train_epochs 3", "--max_steps 5 conflicts with --num_train_epochs 3"),
        ("--save_strategy epoch --save_steps 50", "--save_strategy epoch conflicts with --save_steps 50"),
        ("--evaluation_strategy no --eval_steps 50", "--eval_strategy no conflicts with --eval_steps 50"),
        ("--logging_strategy epoch --logging_steps 5", "--logging_strategy epoch conflicts"),
        ("--eval_delay 3 --eval_strategy no", "--eval_delay 3.0 conflicts with --eval_strategy no"),
        ("--load_best_model_at_end --eval_strategy no", "conflicts with --eval_strategy no"),
        (
            "--load_best_model_at_end --eval_steps 5 --save_strategy epoch",
            "evaluation goes by steps, saving by epoch",
        ),
        (
            "--load_best_model_at_end --eval_steps 5 --save_steps 8",
            "a multiple of --eval_steps; they are 8 and 5",
        ),
        ("--early_stopping_patience 2 --save_strategy no", "--early_stopping_patience conflicts"),
        ("--overwrite_output_dir --resume auto", "--overwrite_output_dir conflicts with --resume auto"),
        ("--per_device_train_batch_size 8 --tokens_per_step 512", "conflicts with --batching tokens"),
        ("--per_device_train_batch_size 8 --streaming", "a stream is batched by tokens"),
        ("--per_device_train_batch_size 8 --loss_normalization mean", "--loss_normalization mean conflicts"),
    ],
)
def test_contradicting_flags_are_errors(words, expected):
    with pytest.raises(ConfigError) as caught:
        run("summarization", *words.split())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # An explicit strategy, and one that is only the recipe's default (epoch).
        ("--eval_steps 50 --load_best_model_at_end", ("steps", 50, "steps", 50)),
        ("--save_steps 50 --load_best_model_at_end", ("steps", 50, "steps", 50)),
        ("--eval_steps 50 --save_steps 100 --load_best_model_at_end", ("steps", 50, "steps", 100)),
        ("--eval_steps 50 --save_strategy steps --load_best_model_at_end", ("steps", 50, "steps", 50)),
        ("--eval_steps 50 --early_stopping_patience 2", ("steps", 50, "steps", 50)),
        ("--eval_steps 50 --save_strategy best --load_best_model_at_end", ("steps", 50, "best", None)),
        ("--load_best_model_at_end", ("epoch", None, "epoch", None)),
        ("--eval_steps 50", ("steps", 50, "epoch", None)),
        ("--eval_steps 0.1 --load_best_model_at_end", ("steps", 0.1, "steps", 0.1)),
    ],
)
def test_the_other_strategy_follows_where_the_best_model_is_kept(words, expected, tmp_path):
    from transformers import TrainingArguments

    config = run("translation", *words.split())
    arguments = config.training_arguments
    names = ("eval_strategy", "eval_steps", "save_strategy", "save_steps")
    assert tuple(arguments.get(name) for name in names) == expected
    # What transformers itself takes for consistent.
    TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        **{n: arguments[n] for n in names if n in arguments},
        load_best_model_at_end=arguments.get("load_best_model_at_end", False),
    )
    follows = [note for note in config.notes if note.startswith("--load_best_model_at_end: ")]
    assert len(follows) == (expected[1] == expected[3] is not None)


def test_defaults_that_train_otherwise_than_the_script_are_named():
    words = ["--per_device_train_batch_size=8", "--num_train_epochs=3"]
    line = run("summarization", *words).notes[-1]
    # The recipe's own numbers beside TrainingArguments' (5e-5, no decay, no warm-up).
    assert "--learning_rate 0.004 (stock 5e-05)" in line
    assert "--warmup_steps 0.1 (stock 0)" in line
    assert "num_train_epochs" not in line
    assert run("summarization", "--num_train_epochs=3").notes == ()


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ((), 0.004),
        (("--model_name_or_path=t5",), 5e-5),
        (("--model_name_or_path=t5", "--do_train", "--do_eval"), 5e-5),
        (("--model_name_or_path=t5", "--learning_rate=3e-4"), 3e-4),
        (("--model_name_or_path=t5", "--peft=lora"), 0.004),
        (("--model_name_or_path=t5", "--do_eval"), 0.004),
    ],
)
def test_a_trained_model_is_trained_with_the_usual_rate_and_a_line_says_so(words, rate):
    config = run("summarization", *words)
    assert config.training_arguments["learning_rate"] == rate
    said = [note for note in config.notes if "the usual one for a trained model" in note]
    assert len(said) == (rate == 5e-5)


def test_flags_without_effect_are_named():
    assert (
        "--metric_for_best_model has no effect without --load_best_model_at_end"
        in run("masked_lm", "--metric_for_best_model=loss").notes
    )
    assert run("masked_lm", "--metric_for_best_model=loss", "--early_stopping_patience=1").notes == ()


def test_secrets_stand_in_no_file(tmp_path):
    config = run("masked_lm", "--token=hf_secret", "--push_to_hub_token=hf_hidden")
    assert config.training_arguments["hub_token"] == "hf_hidden"
    for word in ("hf_secret", "hf_hidden"):
        assert word not in str(config.as_dict()) + str(config.notes)
