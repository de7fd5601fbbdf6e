"""TrainingArguments of former releases, and those of this one that can't be followed.

Facts only, as in `scripts`.
"""

from __future__ import annotations

from typing import Any

from hf_dist.training.flags.stock.flag import ORDER, Stock


def _warmup(ratio: float) -> float:
    if not 0 <= ratio < 1:
        raise ValueError("it must be at least 0 and less than 1")
    return ratio


def _file_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("expected the path of a JSON file")
    return name


def _resume(path: Any) -> str:
    """The Trainer takes a path, True (the newest one of the folder) or False."""
    word = str(path)
    return {"true": "auto", "false": "never"}.get(word.lower(), word)


_REDUCED = "predictions are always reduced batch by batch"
_ROWS_OF_EVALUATION = (
    "evaluation is batched by --max_tokens_per_device; its scores don't depend on how rows are batched"
)
_SAFETENSORS = "weights are saved as safetensors"
_NO_APEX = "mixed precision is torch's own"

ARGUMENTS: tuple[Stock, ...] = (
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
        note="TensorBoard, where --report_to asks for it, writes to the environment's "
        "TENSORBOARD_LOGGING_DIR, or below --output_dir",
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
    Stock(name="group_by_length", kind=bool, note=ORDER),
    Stock(name="sortish_sampler", kind=bool, note=ORDER, needs="max_target_length"),
    Stock(
        name="train_sampling_strategy",
        harmless=("random", "group_by_length"),
        note=ORDER,
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
