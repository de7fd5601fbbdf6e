"""What a run is configured by: the dataclasses behind the flags and the YAML blocks.

`training`, `checkpoint` and `tracking` hold the fields of transformers' TrainingArguments by their own
names, as a plain dict of what the user (or the recipe's defaults) set: TrainingArguments itself is built
late, after the plan (see `hf_dist.training.run.runner`). The block `task` is the settings class of the
recipe's task (see `hf_dist.tasks`), made of the same `option` fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_dist.errors import ConfigError

Batching = Literal["tokens", "examples"]
TooLong = Literal["error", "alone", "drop"]
Normalization = Literal["step", "mean"]
OnNaN = Literal["stop", "skip"]
Peft = Literal["none", "lora", "dora", "rslora"]
Quantize = Literal["4bit", "8bit"]


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a settings class: its default, and what `--help` says of it."""
    return field(default=default, metadata={"help": help, **metadata})


def at_least(owner: object, name: str, least: float) -> None:
    """Checks a field that may be None.

    Raises:
        ConfigError: It is below `least`.
    """
    value = getattr(owner, name)
    if value is not None and value < least:
        raise ConfigError(f"--{name} is {value}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    model_name_or_path: str | None = option(
        None, "Hub name or folder of the model; without it a small one is built from a config."
    )
    config_name: str | None = option(None, "Hub name or folder of the config; default: the model's.")
    tokenizer_name: str | None = option(None, "Hub name or folder of the tokenizer; default: the model's.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the hub.")
    trust_remote_code: bool = option(False, "Run code that the model's repository ships.")
    model_cache_dir: str | None = option(
        None, "Folder for what is downloaded of models; default: below the environment's HF_HOME."
    )
    allow_pickle: bool = option(
        False, "Load weights that are pickled (.bin) and not safetensors; a pickle can run any code."
    )
    resize_embeddings: bool = option(
        False, "Give tokens that the tokenizer has and the model has not embeddings of their own."
    )
    new_head: bool = option(False, "Draw a new head where the model's own is for another number of classes.")
    dropout: float | None = option(None, "Set every dropout probability of the model's config.")

    def __post_init__(self) -> None:
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout is {self.dropout}; it must be at least 0 and less than 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it is trained on. Without a data set the recipe's built-in one is used."""

    dataset_name: str | None = option(None, "Hub name (or a local loading folder) of a data set.")
    dataset_config_name: str | None = option(None, "Configuration of that data set.")
    dataset_revision: str | None = option(None, "Branch, tag or commit of that data set on the hub.")
    dataset_cache_dir: str | None = option(
        None, "Folder for what is downloaded of data sets; default: below the environment's HF_HOME."
    )
    train_split: str | None = option(None, "Its split to train on; default: by the usual names.")
    validation_split: str | None = option(None, "Its split to evaluate on; default: by the usual names.")
    test_split: str | None = option(None, "Its split for --do_predict; default: by the usual names.")
    train_file: str | None = option(
        None, "Training data: a file, a folder of files, a pattern, or what save_to_disk wrote."
    )
    validation_file: str | None = option(None, "Validation data, of the same kinds.")
    test_file: str | None = option(None, "Data for --do_predict, of the same kinds.")
    file_format: str | None = option(
        None,
        "What all these files hold, whatever their endings; default: what the ending says, and where that "
        "says nothing, the contents.",
    )
    validation_fraction: float = option(
        0.1, "Share of the training rows held out where the data has no validation split."
    )
    max_length: int = option(256, "Longest sequence in tokens; longer ones are truncated and counted.")
    max_train_samples: int | None = option(None, "Use only so many training rows.")
    max_eval_samples: int | None = option(None, "Use only so many validation rows.")
    max_predict_samples: int | None = option(None, "Use only so many rows to predict.")
    preprocessing_num_workers: int | None = option(None, "Processes that tokenise; default: one.")
    overwrite_cache: bool = option(False, "Tokenise again even if the cache has it.")
    streaming: bool = option(
        False, "Read the training data as a stream, without a length; needs --max_steps."
    )

    def __post_init__(self) -> None:
        for name in ("max_length", "max_train_samples", "max_eval_samples", "max_predict_samples"):
            at_least(self, name, 1)
        at_least(self, "preprocessing_num_workers", 1)
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(
                f"--validation_fraction is {self.validation_fraction}; it must lie between 0 and 1"
            )
        if self.dataset_name and self.train_file:
            raise ConfigError("--dataset_name and --train_file both name the training data; give one of them")


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """Whether all weights are trained or an adapter beside frozen ones (see docs/adapters.md)."""

    peft: Peft = option(
        "none", "Train an adapter beside frozen weights: LoRA, DoRA or rank-stabilised LoRA; none trains all."
    )
    lora_r: int = option(16, "Rank of the adapter's matrices.")
    lora_alpha: int | None = option(
        None, "The adapter's output is scaled by alpha / rank; default: 2 x rank."
    )
    lora_dropout: float = option(0.0, "Dropout of what goes into the adapter.")
    lora_target: list[str] | None = option(
        None, "Names of the modules that get an adapter; default: all linear layers but the output head."
    )
    lora_modules_to_save: list[str] | None = option(
        None,
        "Modules that are trained and saved in full besides; a new head always is. `embeddings` means the "
        "input embeddings, whatever the model calls them.",
    )
    adapter_name_or_path: str | None = option(
        None, "Go on with this adapter (hub name or folder) instead of a new one."
    )
    quantize: Quantize | None = option(
        None, "Load the frozen weights in so many bits (bitsandbytes, on a CUDA GPU)."
    )

    def __post_init__(self) -> None:
        at_least(self, "lora_r", 1)
        at_least(self, "lora_alpha", 1)
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"--lora_dropout is {self.lora_dropout}; it must be at least 0 and less than 1")
        # a,b and a b say the same.
        for name in ("lora_target", "lora_modules_to_save"):
            words = getattr(self, name)
            if words is not None:
                words = [words] if isinstance(words, str) else words
                split = [part for word in words for part in word.replace(",", " ").split()]
                if not split:
                    raise ConfigError(f"--{name} names no module; leave it out, or name some")
                object.__setattr__(self, name, split)
        self._refuse_conflicts()

    def _refuse_conflicts(self) -> None:
        fields = dataclasses.fields(self)
        changed = [
            f.name for f in fields if f.name.startswith("lora_") and getattr(self, f.name) != f.default
        ]
        if changed and self.adapter_name_or_path is not None:
            raise ConfigError(
                f"--{', --'.join(changed)} given with --adapter_name_or_path {self.adapter_name_or_path}, "
                "which brings its own; drop it, or the adapter"
            )
        if changed and self.peft == "none":
            raise ConfigError(f"--{', --'.join(changed)} given and no adapter is trained; say --peft lora")
        if self.quantize is not None and not self.trains_adapter:
            raise ConfigError(
                f"--quantize {self.quantize} freezes the weights and no adapter is trained; say --peft lora"
            )

    @property
    def trains_adapter(self) -> bool:
        """Whether there is an adapter, a new one or one to go on with."""
        return self.peft != "none" or self.adapter_name_or_path is not None


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How examples become optimizer steps (see docs/batching.md)."""

    batching: Batching = option(
        "tokens", "What a step holds: a number of tokens, or exactly so many examples."
    )
    max_tokens_per_device: int = option(
        4096, "Hard cap on the computed tokens (rows x longest row) of a forward pass."
    )
    tokens_per_step: int | None = option(
        None, "Computed tokens of an optimizer step over all devices; default: max_tokens_per_device."
    )
    micro_batches_per_rank: int | None = option(
        None, "Split each step into so many forward passes a rank; default: as few as the plan allows."
    )
    window: int | None = option(None, "Examples sorted by length together; default: chosen from the data.")
    pad_to_multiple_of: int | None = option(
        None, "Rows are padded to a multiple of this many tokens; default: 8 with --bf16 or --fp16, else 1."
    )
    too_long: TooLong = option(
        "error", "An example longer than the cap: an error, a forward pass of its own, or dropped."
    )
    dump_batches: str | None = option(None, "Write one JSON line per rank and micro-batch to this file.")
    probe_longest_first: bool = option(
        False, "Run the costliest step first, so that running out of memory happens at once."
    )

    def __post_init__(self) -> None:
        for field_ in dataclasses.fields(self):
            if field_.type in ("int", "int | None"):
                at_least(self, field_.name, 1)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Which engine runs it."""

    preset: str = option("none", "A preset (`hf-dist presets` lists them) or a DeepSpeed JSON file.")
    optim_from_json: bool = option(False, "Let the JSON's optimizer and scheduler override the flags.")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Own fields of the `training` block, beside those of TrainingArguments."""

    loss_normalization: Normalization | None = option(
        None,
        "Divide a step's loss by its own items, or by the plan's mean items per step; default: mean for "
        "tasks whose item is an example under token budgets, else step.",
    )
    early_stopping_patience: int | None = option(
        None, "Stop after so many evaluations without a better metric_for_best_model."
    )
    early_stopping_threshold: float = option(0.0, "What counts as better for early stopping.")
    on_nan: OnNaN = option(
        "stop", "A loss that is NaN or infinite: stop (the last checkpoint is kept), or leave the step out."
    )
    resume: str = option(
        "auto",
        "auto: go on from the newest whole checkpoint, if there is one; never: start afresh; or the path of "
        "a checkpoint.",
    )
    overwrite_output_dir: bool = option(
        False,
        "Start afresh in --output_dir also where a run has finished; its checkpoints there are removed.",
    )
    rank_timeout_seconds: float = option(
        60.0, "A rank that says nothing for so long counts as dead and ends the job."
    )
    hang_timeout_seconds: float = option(
        900.0,
        "A job without any progress for so long (a step, a save) ends and names who stands still.",
    )
    checkpoint_copy: str | None = option(
        None, "Copy each whole checkpoint to this fsspec URL, and get the newest one back from there."
    )
    dry_run: bool = option(False, "Print the config, the plan and the engine, and train nothing.")

    def __post_init__(self) -> None:
        at_least(self, "early_stopping_patience", 1)
        at_least(self, "rank_timeout_seconds", 5)
        at_least(self, "hang_timeout_seconds", 5)


BLOCKS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "peft": PeftConfig,
    "batching": BatchingConfig,
    "engine": EngineConfig,
    "training": LoopConfig,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run.

    Attributes:
        task: The settings of the task, an instance of its `settings_class`; None for its defaults.
        training_arguments: Field names of TrainingArguments and what was set.
        notes: What the log says of how these settings came about; no setting itself.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    task: Any = None
    training_arguments: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The blocks as plain dicts, ready for JSON or YAML; without notes, and with no secret."""
        blocks = dataclasses.asdict(self)
        del blocks["notes"]
        if blocks["training_arguments"].get("hub_token") is not None:
            blocks["training_arguments"]["hub_token"] = "(not shown)"
        return blocks
