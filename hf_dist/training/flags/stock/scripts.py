"""The ModelArguments and DataTrainingArguments of the example scripts that are not ours by the same name.

Facts only: names and meaning, 2020 to transformers 5. docs/stock_flags.md shows the same to users, and a
test walks it.
"""

from __future__ import annotations

from typing import Any

from hf_dist.training.flags.stock.flag import ORDER, Stock

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


def _text_columns(names: str) -> dict[str, Any]:
    columns = [name.strip() for name in names.split(",") if name.strip()]
    if not columns:
        raise ValueError("it names no column")
    return {"text_column": columns[0]} if len(columns) == 1 else {"text_columns": columns}


_FAST = "tokenizers are always the fast ones"
_HUB_TOKEN = "the token of `hf auth login`, or of the environment's HF_TOKEN, is used where one is needed"
_PADDING = "rows are padded to the longest of their batch; what is padded changes no result"

MODEL: tuple[Stock, ...] = (
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


DATA: tuple[Stock, ...] = (
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
    # The script's README has it so: its parser takes beginnings of names.
    Stock(name="text_column_name", sets=_text_columns, needs="text_columns"),
    Stock(name="text_column_delimiter", ours=("text_delimiter",), needs="text_delimiter"),
    *(
        Stock(name="text_column_name", ours=(name,), needs=needs)
        for name, needs in (
            ("tokens_column", "tokens_column"),
            ("text_column", "summary_column"),
            ("text_column", "messages_column"),
            ("text_column", "mlm_probability"),
        )
    ),
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
        note="accuracy and F1 are always given",
        refused="it is not computed here; --do_predict writes predictions.jsonl, which any metric can score",
        needs="problem",
    ),
    Stock(name="shuffle_train_dataset", kind=bool, note=ORDER),
    Stock(name="shuffle_seed", kind=int, note=ORDER),
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
