"""The model before the first step, the same on every engine and rank.

What no file holds is drawn from `--seed` and nothing else: a model built from a config (once, by one
process a node, into the cache), and what a named model lacks for the task (a head, a pooler, embeddings of
new tokens). Under ZeRO-3 transformers 5.24 would draw other values, take no weights of another size and
save some models by old names; so there rank 0 loads the whole model as on one process, and the others get
their parts of it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_model
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_dist.config import ModelConfig
from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.training.engines.lifecycle import outside_zero_init
from hf_dist.training.models.partitioned import partition_from_main
from hf_dist.training.models.parts import head_modules, is_in
from hf_dist.training.ranks.gather import on_main

logger = logging.getLogger("hf_dist")

_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, and which of its weights no file held.

    Attributes:
        model: Partitioned under ZeRO-3.
        drawn: Names of the weights that were drawn anew, with the seed.
    """

    model: PreTrainedModel
    drawn: tuple[str, ...] = ()


def _is_dropout(name: str) -> bool:
    return any(word == "drop" or word.endswith(("dropout", "layerdrop", "pdrop")) for word in name.split("_"))


def set_dropout(config: PretrainedConfig, probability: float) -> list[str]:
    """Sets every dropout probability of a model's config; returns the names that were set.

    A field counts where a word of its name speaks of dropout and its value is a number
    (`hidden_dropout_prob`, `attn_pdrop`, `dropout`, `classifier_dropout`, `encoder_layerdrop` ...).

    Raises:
        ConfigError: If the config has no such field.
    """
    names = []
    for name, value in config.to_dict().items():
        is_probability = isinstance(value, (int, float)) and not isinstance(value, bool)
        # BERT's classifier_dropout is None where it follows hidden_dropout_prob.
        if _is_dropout(name) and (is_probability or name == "classifier_dropout"):
            setattr(config, name, probability)
            names.append(name)
    if not names:
        raise ConfigError(
            f"--dropout {probability}: the config of {config.model_type} has no dropout probability; "
            "leave the flag out"
        )
    return names


def _initialise(config: PretrainedConfig, auto_class: Any, seed: int, folder: Path) -> None:
    # The caller's random state is left as it was: who initialises must not differ from who only loads.
    # One process builds it alone, so ZeRO-3 must not partition it on the way.
    with _drawn_with(seed), outside_zero_init():
        model = auto_class.from_config(config)
    # `save_pretrained` writes nothing on another rank than 0 (transformers 5.24), and any may be the builder.
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def initial_model_folder(config: PretrainedConfig, auto_class: Any, seed: int) -> Path:
    """Returns the cached folder of the model drawn from `config` with `seed`, making it if needed."""
    key = key_of(
        auto_class.__name__, seed, torch.__version__, transformers.__version__, config.to_json_string()
    )
    return build_once(
        cache_dir() / "models" / f"{config.model_type}-{key}",
        lambda folder: _initialise(config, auto_class, seed, folder),
    )


@contextlib.contextmanager
def _drawn_with(seed: int) -> Iterator[None]:
    """Draws from `seed` inside the block; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def load_model(
    config: PretrainedConfig,
    auto_class: Any,
    model: ModelConfig,
    *,
    seed: int,
    checkpoint: Path | None = None,
    tokens: int | None = None,
    complete: bool = False,
    options: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Loads the model that training starts from, or that a checkpoint holds.

    Args:
        config: The model's.
        auto_class: The transformers auto class of the task.
        model: Names it; without a name it is drawn from `config`.
        seed: Draws what is drawn.
        checkpoint: Its weights are taken instead.
        tokens: Tokens that must have an embedding under --resize_embeddings.
        complete: Whether nothing may be drawn, since nothing will be trained.
        options: More for `from_pretrained`.

    Must be called after TrainingArguments exist, or ZeRO-3 does not partition it (transformers 5.24 reads
    the DeepSpeed config from a global that TrainingArguments sets); then all ranks call it together.

    Raises:
        ConfigError: If the named model can't be loaded for this task.
        CheckpointError: If the checkpoint holds another model.
    """
    config = copy.deepcopy(config)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    more = tokens if model.resize_embeddings and tokens and rows is not None and tokens > rows else None

    def whole() -> LoadedModel:
        if checkpoint is not None:
            if more is not None:
                config.get_text_config().vocab_size = more
            return LoadedModel(model=_load_checkpoint(config, auto_class, model, checkpoint))
        if model.model_name_or_path is None:
            folder = initial_model_folder(config, auto_class, seed)
            return LoadedModel(model=auto_class.from_pretrained(folder, config=config))
        found = _load_named(config, auto_class, model, seed=seed, complete=complete, options=options or {})
        if more is not None:
            resize_embeddings(found.model, more, seed=seed)
        return found

    # Quantised weights are not partitioned.
    if not is_deepspeed_zero3_enabled() or options:
        return whole()
    drawn: list[str] = []

    def whole_on_main() -> PreTrainedModel:
        with outside_zero_init():
            found = whole()
        drawn.extend(found.drawn)
        return found.model

    parted = partition_from_main(whole_on_main, auto_class, trust_remote_code=model.trust_remote_code)
    return LoadedModel(model=parted, drawn=tuple(on_main(lambda: drawn)))


def _load_named(
    config: PretrainedConfig,
    auto_class: Any,
    model: ModelConfig,
    *,
    seed: int,
    complete: bool,
    options: Mapping[str, Any],
) -> LoadedModel:
    name = model.model_name_or_path
    try:
        with _drawn_with(seed), _without_report():
            loaded, found = auto_class.from_pretrained(
                name,
                config=config,
                revision=model.model_revision,
                cache_dir=model.model_cache_dir,
                trust_remote_code=model.trust_remote_code,
                # A pickle runs any code it holds; safetensors are only numbers.
                use_safetensors=None if model.allow_pickle else True,
                # Sizes are compared below, and refused by our own flag's name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--model_name_or_path {name} can't be loaded as {auto_class.__name__}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    mismatched = {weight: (tuple(there), tuple(here)) for weight, there, here in found["mismatched_keys"]}
    _check_sizes(loaded, mismatched, model)
    drawn = sorted({*found["missing_keys"], *mismatched})
    if drawn and len(drawn) == len(loaded.state_dict()):
        raise ConfigError(
            f"--model_name_or_path {name}: none of its weights is one of {type(loaded).__name__}'s (it has "
            f"{_some(sorted(found['unexpected_keys']))}); name a model of this kind, or its own --config_name"
        )
    if drawn and complete:
        raise ConfigError(
            f"--model_name_or_path {name} holds no {_some(drawn)}, so it is not trained for this task; "
            "say --do_train, or name a model that is"
        )
    if drawn:
        logger.info("%s doesn't hold %s: drawn anew with --seed %d", name, _some(drawn), seed)
    return LoadedModel(model=loaded, drawn=tuple(drawn))


def _check_sizes(
    loaded: PreTrainedModel, mismatched: Mapping[str, tuple[tuple[int, ...], ...]], model: ModelConfig
) -> None:
    """Refuses weights of another size, but those of a head under --new_head."""
    heads = head_modules(loaded)
    body = sorted(weight for weight in mismatched if not is_in(weight, heads))
    for weight in body or (() if model.new_head else sorted(mismatched)):
        there, here = mismatched[weight]
        mend = (
            "the config is of another model; leave --config_name out, or name the one that belongs to it"
            if body
            else "the data has another number of classes than it was trained on; say --new_head to draw a "
            "new head, or train on the same classes"
        )
        raise ConfigError(
            f"--model_name_or_path {model.model_name_or_path}: {weight} is {' x '.join(map(str, there))} in "
            f"its file and {' x '.join(map(str, here))} here: {mend}"
        )


def _some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Keeps transformers' table of missing and surplus weights out of the log: we say it in one line."""
    theirs = logging.getLogger("transformers.modeling_utils")

    def errors_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    # Not its level: from WARNING on, transformers 5.24 looks for a tensor parallel plan and misses it aloud.
    theirs.addFilter(errors_only)
    try:
        yield
    finally:
        theirs.removeFilter(errors_only)


def resize_embeddings(model: PreTrainedModel, tokens: int, *, seed: int) -> None:
    """Gives a model that many embeddings; new ones are drawn around the mean, the same on every rank."""
    with _drawn_with(seed):
        model.resize_token_embeddings(tokens)


def _load_checkpoint(
    config: PretrainedConfig, auto_class: Any, model: ModelConfig, checkpoint: Path
) -> PreTrainedModel:
    try:
        loaded, found = auto_class.from_pretrained(
            checkpoint,
            config=config,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint} can't be loaded as {auto_class.__name__}: {str(error).splitlines()[0]}"
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{checkpoint} doesn't hold {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}: it is "
            "of another model; name another --output_dir, or say --resume never"
        )
    return loaded
