"""The flags of transformers' example scripts, of several years, that are not ours by the same name.

Facts only: what each is called, what it holds, and what it means here. `stock_flags.translate` acts on them.
The scripts are run_glue, run_classification, run_ner, run_qa, run_summarization, run_translation, run_clm
and run_mlm (2020 to transformers 5), with the TrainingArguments that each of them had. docs/stock_flags.md
shows the same to users, and a test walks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stock:
    """One flag of theirs. What of it applies first is what happens.

    Attributes:
        name: Theirs.
        kind: Type of its value.
        harmless: Values that change nothing here; `note` says why. None: every value, if `note` is all
            there is.
        note: What is said of a harmless value.
        ours: Our flag of the same meaning: the first of these that the recipe has.
        value: Its value, from theirs.
        sets: Several settings of ours, from their value.
        environment: Variable of the environment that takes it; for secrets, which no file may show.
        refused: Why it can't be followed, and what to do instead.
        needs: A flag that the recipe must have; others don't know this one.
    """

    name: str
    kind: type = str
    harmless: tuple[Any, ...] | None = None
    note: str = ""
    ours: tuple[str, ...] = ()
    value: Callable[[Any], Any] = lambda value: value
    sets: Callable[[Any], dict[str, Any]] | None = None
    environment: str | None = None
    refused: str = ""
    needs: str | None = None


# The columns and splits of the tasks of GLUE (Wang et al. 2019), as the hub's data set names them.
_GLUE_TEXTS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
    "mnli": ("premise", "hypothesis"),
}


def _glue(task: str) -> dict[str, Any]:
    name = task.lower()
    if name not in _GLUE_TEXTS:
        raise ValueError(f"it is none of {', '.join(sorted(_GLUE_TEXTS))}")
    texts = dict(zip(("text_column", "text_pair_column"), _GLUE_TEXTS[name], strict=False))
    found = {"dataset_name": "nyu-mll/glue", "dataset_config_name": name, **texts, "label_column": "label"}
    if name == "mnli":
        found.update(validation_split="validation_matched", test_split="test_matched")
    if name == "stsb":
        found["problem"] = "regression"
    return found


def _share(percent: int) -> float:
    if not 0 < percent < 100:
        raise ValueError("it must lie between 0 and 100")
    return percent / 100


def _warmup(ratio: float) -> float:
    if not 0 <= ratio < 1:
        raise ValueError("it must be at least 0 and less than 1")
    return ratio


def _text_columns(names: str) -> dict[str, Any]:
    columns = [name.strip() for name in names.split(",") if name.strip()]
    if not columns:
        raise ValueError("it names no column")
    return {"text_column": columns[0]} if len(columns) == 1 else {"text_columns": columns}


def _file_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("expected the path of a JSON file")
    return name


def _resume(path: Any) -> str:
    """The Trainer takes a path, True (the newest one of the folder) or False."""
    word = str(path)
    return {"true": "auto", "false": "never"}.get(word.lower(), word)


_ALWAYS_PLANNED = "rows of like length stand together in every batch as it is, in an order that --seed draws"
_FAST = "tokenizers are always the fast ones"
_HUB_TOKEN = "the token of `hf auth login`, or of the environment's HF_TOKEN, is used where one is needed"
_REDUCED = "predictions are always reduced batch by batch"
_ROWS_OF_EVALUATION = (
    "evaluation is batched by --max_tokens_per_device; its scores don't depend on how rows are batched"
)
_SAFETENSORS = "weights are saved as safetensors"
_PADDING = "rows are padded to the longest of their batch; what is padded changes no result"
_NO_APEX = "mixed precision is torch's own"

# ---- ModelArguments ----

_MODEL = (
    Stock(
        name="cache_dir",
        sets=lambda folder: {"model_cache_dir": folder, "dataset_cache_dir": folder},
    ),
    Stock(name="use_fast_tokenizer", kind=bool, harmless=(True,), note=_FAST, refused=f"{_FAST}; drop it"),
    Stock(name="token", environment="HF_TOKEN"),
    Stock(name="use_auth_token", kind=bool, note=_HUB_TOKEN),
    Stock(name="low_cpu_mem_usage", kind=bool, note="models are always loaded so"),
    *(
        Stock(
            name=name,
            harmless=("auto",),
            note="weights keep the type they are saved in",
            refused="weights keep the type they are saved in; --bf16 and --fp16 compute in half precision, "
            "and --quantize loads fewer bits",
        )
        for name in ("torch_dtype", "dtype")
    ),
    Stock(name="ignore_mismatched_sizes", kind=bool, ours=("new_head",)),
    Stock(
        name="model_type",
        refused="a model from nothing is made from a config; name a folder with a config.json by "
        "--config_name",
    ),
    Stock(
        name="config_overrides",
        refused="change the fields in a config.json and name its folder by --config_name",
    ),
    Stock(
        name="resize_position_embeddings",
        kind=bool,
        harmless=(False,),
        note="positions are never added",
        refused="positions are never added to a model; give a shorter --max_length, or a model with more",
        needs="source_prefix",
    ),
    *(
        Stock(
            name=name,
            kind=bool,
            harmless=(False,),
            note="all weights are trained",
            refused="parts of a model can't be frozen; --peft lora trains few weights",
            needs="source_prefix",
        )
        for name in ("freeze_encoder", "freeze_embeds")
    ),
)

# ---- DataTrainingArguments ----

_DATA = (
    Stock(name="task_name", sets=_glue, needs="text_pair_column"),
    Stock(
        name="task_name",
        harmless=("ner", "NER"),
        note="tags are read from --tags_column, found by the usual names (ner_tags is one)",
        ours=("tags_column",),
        value=lambda task: f"{task.lower()}_tags",
        needs="tags_column",
    ),
    Stock(name="max_seq_length", kind=int, ours=("max_length",)),
    Stock(name="max_source_length", kind=int, ours=("max_length",), needs="max_target_length"),
    Stock(name="pad_to_max_length", kind=bool, note=_PADDING),
    Stock(name="max_val_samples", kind=int, ours=("max_eval_samples",)),
    Stock(name="max_test_samples", kind=int, ours=("max_predict_samples",)),
    Stock(name="train_data_file", ours=("train_file",)),
    Stock(name="eval_data_file", ours=("validation_file",)),
    Stock(
        name="validation_split_percentage",
        kind=int,
        ours=("validation_fraction",),
        value=_share,
    ),
    Stock(name="train_split_name", ours=("train_split",)),
    Stock(name="validation_split_name", ours=("validation_split",)),
    Stock(name="test_split_name", ours=("test_split",)),
    Stock(name="text_column_names", sets=_text_columns, needs="text_columns"),
    Stock(name="text_column_delimiter", ours=("text_delimiter",), needs="text_delimiter"),
    Stock(name="text_column_name", ours=("tokens_column", "text_column")),
    Stock(name="label_column_name", ours=("tags_column", "label_column")),
    Stock(
        name="do_regression",
        kind=bool,
        sets=lambda yes: {"problem": "regression"} if yes else {"problem": "single_label"},
        needs="problem",
    ),
    Stock(
        name="remove_splits",
        note="no split is read but those that --train_split, --validation_split and --test_split name, or "
        "the usual names",
        needs="problem",
    ),
    Stock(
        name="remove_columns",
        note="no column is read but the text and the label (--text_column, --label_column)",
        needs="problem",
    ),
    Stock(
        name="metric_name",
        harmless=("accuracy", "f1"),
        note="accuracy and F1 are always given (--help: metric_for_best_model chooses)",
        refused="it is not computed here; --do_predict writes predictions.jsonl, which any metric can score",
        needs="problem",
    ),
    Stock(name="shuffle_train_dataset", kind=bool, note=_ALWAYS_PLANNED),
    Stock(name="shuffle_seed", kind=int, note=_ALWAYS_PLANNED),
    Stock(
        name="return_entity_level_metrics",
        kind=bool,
        harmless=(False,),
        note="scores are those over all entities",
        refused="scores are those over all entities; --do_predict writes the tags of each row, which seqeval "
        "can score by kind",
        needs="tags_column",
    ),
    Stock(name="n_best_size", kind=int, ours=("n_best",), needs="n_best"),
    Stock(name="max_answer_length", kind=int, ours=("max_answer_tokens",), needs="max_answer_tokens"),
    Stock(name="max_query_length", kind=int, ours=("max_question_tokens",), needs="max_question_tokens"),
    Stock(
        name="lang",
        refused="name a tokenizer that was saved with its language by --tokenizer_name",
        needs="summary_column",
    ),
    Stock(
        name="forced_bos_token",
        note="the token of --target_lang is forced where the model needs it",
        needs="target_lang",
    ),
    Stock(
        name="forced_bos_token",
        refused="it is taken from the model's generation_config.json; set forced_bos_token_id there",
        needs="summary_column",
    ),
    Stock(
        name="ignore_pad_token_for_loss",
        kind=bool,
        harmless=(True,),
        note="padding never counts",
        refused="padding never counts in the loss; drop it",
        needs="max_target_length",
    ),
    Stock(name="eval_beams", kind=int, ours=("num_beams",), needs="num_beams"),
    Stock(
        name="line_by_line",
        kind=bool,
        note="each row of the data (each line of a text file) is a sequence of its own",
        needs="mlm_probability",
    ),
    Stock(
        name="mlm",
        kind=bool,
        harmless=(True,),
        note="it is what this recipe does",
        refused="this recipe learns masked tokens; recipes/causal_lm.py learns the next one",
        needs="mlm_probability",
    ),
    Stock(
        name="keep_linebreaks",
        kind=bool,
        note="each line of a text file is a row of its own, without its line end; --packing fills rows with "
        "several",
        needs="packing",
    ),
)

# ---- TrainingArguments and Seq2SeqTrainingArguments, gone or without effect ----

_TRAINING = (
    Stock(name="evaluation_strategy", ours=("eval_strategy",)),
    Stock(
        name="evaluate_during_training",
        kind=bool,
        harmless=(False,),
        note="--eval_strategy says when it is evaluated",
        ours=("eval_strategy",),
        value=lambda _: "steps",
    ),
    Stock(name="warmup_ratio", kind=float, ours=("warmup_steps",), value=_warmup),
    Stock(name="per_gpu_train_batch_size", kind=int, ours=("per_device_train_batch_size",)),
    *(
        Stock(name=name, kind=int, note=_ROWS_OF_EVALUATION)
        for name in ("per_device_eval_batch_size", "per_gpu_eval_batch_size")
    ),
    Stock(name="no_cuda", kind=bool, ours=("use_cpu",)),
    Stock(name="use_mps_device", kind=bool, note="a device is found by itself; --use_cpu leaves it alone"),
    Stock(
        name="adafactor",
        kind=bool,
        harmless=(False,),
        note="--optim names the optimizer",
        ours=("optim",),
        value=lambda _: "adafactor",
    ),
    Stock(name="resume_from_checkpoint", ours=("resume",), value=_resume),
    Stock(
        name="logging_dir",
        note="TensorBoard, where --report_to asks for it, writes to the environment's TENSORBOARD_LOGGING_DIR, "
        "or below --output_dir",
    ),
    Stock(
        name="save_safetensors",
        kind=bool,
        harmless=(True,),
        note=_SAFETENSORS,
        refused=f"{_SAFETENSORS}; drop it",
    ),
    Stock(name="fp16_opt_level", note=_NO_APEX),
    *(
        Stock(
            name=name,
            harmless=("auto", "amp", "cuda_amp"),
            note=_NO_APEX,
            refused=f"{_NO_APEX}; drop it",
        )
        for name in ("fp16_backend", "half_precision_backend")
    ),
    Stock(name="group_by_length", kind=bool, note=_ALWAYS_PLANNED),
    Stock(name="sortish_sampler", kind=bool, note=_ALWAYS_PLANNED, needs="max_target_length"),
    Stock(
        name="train_sampling_strategy",
        harmless=("random", "group_by_length"),
        note=_ALWAYS_PLANNED,
        refused="batches come from the plan (--batching, --window)",
    ),
    Stock(name="length_column_name", note="lengths are read from the tokenised data"),
    Stock(
        name="predict_with_generate",
        kind=bool,
        note="evaluation and prediction always generate",
        needs="max_target_length",
    ),
    Stock(
        name="generation_max_length", kind=int, ours=("val_max_target_length",), needs="val_max_target_length"
    ),
    Stock(name="generation_num_beams", kind=int, ours=("num_beams",), needs="num_beams"),
    Stock(
        name="generation_config",
        refused="it is read from the model's own folder; --num_beams and --val_max_target_length change it",
        needs="max_target_length",
    ),
    Stock(name="push_to_hub_model_id", ours=("hub_model_id",)),
    Stock(name="push_to_hub_token", ours=("hub_token",)),
    Stock(
        name="push_to_hub_organization",
        refused="say --hub_model_id ORGANIZATION/NAME",
    ),
    Stock(name="deepspeed", ours=("preset",), value=_file_name),
    Stock(
        name="sharded_ddp",
        harmless=("",),
        note="nothing is sharded",
        refused="say --preset zero2 (gradients and optimizer state) or zero3 (parameters too)",
    ),
    Stock(
        name="fsdp",
        harmless=("",),
        note="nothing is sharded",
        refused="FSDP is not supported yet; --preset zero3 shards parameters, gradients and optimizer state",
    ),
    Stock(name="fsdp_config", refused="FSDP is not supported yet; use --preset zero3"),
    Stock(
        name="fsdp_min_num_params",
        kind=int,
        harmless=(0,),
        note="nothing is sharded",
        refused="FSDP is not supported yet; use --preset zero3",
    ),
    Stock(name="fsdp_transformer_layer_cls_to_wrap", refused="FSDP is not supported yet; use --preset zero3"),
    Stock(name="xpu_backend", ours=("ddp_backend",)),
    Stock(
        name="local_rank",
        kind=int,
        note="the launcher says it in the environment",
    ),
    Stock(
        name="tpu_num_cores", kind=int, refused="TPUs are not supported; run on CPUs or GPUs and leave it out"
    ),
    Stock(
        name="tpu_metrics_debug",
        kind=bool,
        harmless=(False,),
        note="there is no TPU",
        refused="TPUs are not supported; leave it out",
    ),
    Stock(
        name="past_index",
        kind=int,
        harmless=(-1,),
        note="no state is kept between batches",
        refused="no state is kept between batches; leave it out",
    ),
    Stock(
        name="mp_parameters",
        harmless=("",),
        note="SageMaker's launcher is not used",
        refused="SageMaker's model parallelism is not supported; --preset zero3 shards parameters",
    ),
    Stock(name="torchdynamo", ours=("torch_compile_backend",)),
    *(
        Stock(
            name=name,
            kind=bool,
            harmless=(False,),
            note="evaluation runs the model as it is",
            refused="evaluation runs the model as it is; --torch_compile compiles it",
        )
        for name in ("jit_mode_eval", "use_ipex")
    ),
    Stock(name="ray_scope", note="no hyperparameters are searched"),
    *(
        Stock(
            name=name,
            kind=bool,
            harmless=(False,),
            note="each rank makes its own batches",
            refused="each rank makes its own batches from the plan; leave it out",
        )
        for name in ("dispatch_batches", "split_batches")
    ),
    Stock(name="include_tokens_per_second", kind=bool, note="tokens per second are always counted"),
    Stock(name="use_legacy_prediction_loop", kind=bool, note="evaluation has a loop of its own"),
    Stock(
        name="include_inputs_for_metrics",
        kind=bool,
        harmless=(False,),
        note="scores are made from the predictions and the data set",
        refused="scores are made from the predictions and the data set; leave it out",
    ),
    Stock(name="include_for_metrics", refused="scores are made from the predictions and the data set"),
    Stock(name="eval_accumulation_steps", kind=int, note=_REDUCED),
    Stock(name="eval_do_concat_batches", kind=bool, note=_REDUCED),
    Stock(name="batch_eval_metrics", kind=bool, note=_REDUCED),
    Stock(name="eval_use_gather_object", kind=bool, note="predictions are always gathered by row number"),
    Stock(
        name="prediction_loss_only",
        kind=bool,
        harmless=(False,),
        note="evaluation always scores",
        refused="evaluation always scores; leave out --do_eval to skip it",
    ),
    Stock(
        name="auto_find_batch_size",
        kind=bool,
        harmless=(False,),
        note="the plan says how large batches are",
        refused="it would change the plan of the batches; lower --max_tokens_per_device instead",
    ),
    Stock(
        name="dataloader_drop_last",
        kind=bool,
        harmless=(False,),
        note="the plan never drops an example",
        refused="the plan never drops an example",
    ),
    Stock(
        name="average_tokens_across_devices",
        kind=bool,
        harmless=(True,),
        note="the loss is always divided by the items of the whole step",
        refused="the loss is always divided by the items of the whole step",
    ),
    Stock(
        name="ignore_data_skip",
        kind=bool,
        harmless=(False,),
        note="resuming skips by step index and loads no data for it",
        refused="resuming skips by step index and loads no data for it",
    ),
    Stock(
        name="logging_nan_inf_filter",
        kind=bool,
        harmless=(False,),
        note="a NaN loss is never hidden from the log",
        refused="a NaN loss is never hidden from the log",
    ),
    Stock(
        name="use_cache",
        kind=bool,
        harmless=(False,),
        note="training keeps no cache of keys and values",
        refused="a cache is of use only in generation, and packed documents are not kept apart with one",
    ),
)


STOCK: tuple[Stock, ...] = (*_MODEL, *_DATA, *_TRAINING)
