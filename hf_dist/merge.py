"""`hf-dist merge`: an adapter and its base become one plain model, checked before it is written."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.training.adapters.files import ADAPTER_CONFIG, BASE_FOLDER, Base, base_of
from hf_dist.training.adapters.lora import load_adapter

TOLERANCE = 1e-5
"""Largest difference of the merged model's logits from the adapter model's, relative to the largest logit."""

DTYPES = ("float32", "bfloat16", "float16")

# Rows and tokens of the batch that both models are run on.
_ROWS, _TOKENS = 4, 24
_AUTO_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was written.

    Attributes:
        folder: Where.
        base: Where the base came from.
        difference: Of the logits from those of the adapter model, relative to the largest of them.
        dtype: Of the weights.
        bytes: Size of the weights' files.
    """

    folder: Path
    base: str
    difference: float
    dtype: str
    bytes: int


def merge(adapter: Path, out: Path, *, dtype: str | None = None, trust_remote_code: bool = False) -> Merged:
    """Merges an adapter into its base and writes a model that loads without peft.

    Both are merged and compared in float32, on a random batch; only then are the weights rounded to `dtype`.

    Args:
        adapter: Output folder of a run with an adapter, or one of its checkpoints.
        out: Folder to write, which must not exist yet.
        dtype: Of the written weights; default: the base's own.
        trust_remote_code: Run code that the base's repository ships.

    Raises:
        CheckpointError: If there is no adapter, its base is missing, the folder exists, or the merged model
            computes something else.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is none; expected one of {', '.join(DTYPES)}")
    if out.exists():
        raise CheckpointError(f"{out} exists; name a folder that doesn't, or remove it")
    base = base_of(adapter)
    config = _load_config(base, trust_remote_code)
    model = _load_base(adapter, base, config, trust_remote_code)
    batch = random_batch(model.config)
    adapted = load_adapter(model, str(adapter), trains=False).eval()
    wanted = _logits(adapted, batch)
    tied = getattr(model.config, "tie_word_embeddings", None)
    with warnings.catch_warnings():
        # peft unties what has two trained copies; they are equal.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        plain: Any = adapted.merge_and_unload(safe_merge=True)
    if tied is not None:
        plain.config.tie_word_embeddings = tied
    _tie(plain, adapter)
    difference = relative_difference(_logits(plain.eval(), batch), wanted)
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"the merged model's logits differ from the adapter model's by {difference:.1e} of the largest "
            f"(at most {TOLERANCE:g}); nothing was written"
        )
    name = dtype or _own_dtype(config)
    plain.to(getattr(torch, name))
    if (adapter / BASE_FOLDER / "generation_config.json").is_file():
        plain.generation_config = GenerationConfig.from_pretrained(adapter / BASE_FOLDER)
    _write(plain, adapter, base, out, trust_remote_code)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return Merged(folder=out, base=base.name, difference=difference, dtype=name, bytes=size)


def _tie(model: Any, adapter: Path) -> None:
    """Ties the weights that the model's class ties, as loading the written model will.

    Of a pair of which only the copy was trained (the bias of BERT's output layer) both take its value.
    """
    kept = _saved(adapter).get("modules_to_save") or ()
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if any(_holds(module, name) for module in kept) and not any(_holds(m, source) for m in kept):
            model.get_parameter(source).data = model.get_parameter(name).data
    model.tie_weights()


def _saved(adapter: Path) -> dict[str, Any]:
    """The adapter's own config."""
    return dict(json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")))


def _own_dtype(config: PretrainedConfig) -> str:
    found = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return found if found in DTYPES else "float32"


def _load_config(base: Base, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            base.config, revision=base.revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise _missing_base(base, error) from error


def _missing_base(base: Base, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300].rstrip(".")
    return CheckpointError(
        f"the base model {base.name} can't be loaded ({reason}); expected a folder, or a name on the hub "
        "and a network or cache to get it from"
    )


def _model_class(adapter: Path, base: Base, config: PretrainedConfig) -> Any:
    """The class that the adapter was trained on."""
    saved = _saved(adapter)
    names = [
        # Where we wrote the config, it names the class itself.
        *((config.architectures or []) if base.config != base.name else []),
        _AUTO_CLASSES.get(saved.get("task_type") or "", ""),
        (saved.get("auto_mapping") or {}).get("base_model_class", ""),
        *(config.architectures or []),
    ]
    found = [getattr(transformers, name) for name in names if name and hasattr(transformers, name)]
    if not found:
        raise CheckpointError(
            f"{adapter / ADAPTER_CONFIG} doesn't say of which kind its model is (task_type is "
            f"{saved.get('task_type')}, auto_mapping {saved.get('auto_mapping')})"
        )
    return found[0]


def _load_base(
    adapter: Path, base: Base, config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    kept = _saved(adapter).get("modules_to_save") or ()
    more = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        model, info = _model_class(adapter, base, config).from_pretrained(
            base.name,
            config=config,
            revision=base.revision,
            dtype=torch.float32,
            # A head for other classes than the base's own comes with the adapter.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **more,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise _missing_base(base, error) from error
    absent = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])]
    lacking = sorted(key for key in absent if not any(_holds(module, key) for module in kept))
    if lacking:
        raise CheckpointError(
            f"the base model {base.name} lacks {', '.join(lacking[:5])}, and the adapter doesn't bring it; "
            "bring back the base that the adapter was trained on"
        )
    return model


def _holds(module: str, key: str) -> bool:
    """Whether a weight belongs to a module that is named by the end of its name."""
    return f".{module}." in f".{key}"


def random_batch(config: PretrainedConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens (rows, tokens), half of the rows padded; for an encoder-decoder its targets too."""
    text: Any = config.get_text_config()
    random = torch.Generator().manual_seed(seed)
    special = [getattr(text, name, None) for name in ("pad_token_id", "eos_token_id")]
    pad, end = (token[0] if isinstance(token, list) else token for token in special)

    def draw() -> Tensor:
        tokens = torch.randint(0, int(text.vocab_size), (_ROWS, _TOKENS), generator=random)
        plain = next(token for token in range(3) if token not in (pad, end))
        for token in (pad, end):
            if token is not None:
                tokens[tokens == token] = plain
        return tokens

    tokens, mask = draw(), torch.ones(_ROWS, _TOKENS, dtype=torch.long)
    mask[_ROWS // 2 :, _TOKENS // 2 :] = 0
    if pad is not None:
        tokens[mask == 0] = pad
    if end is not None:
        # Some classifiers of encoder-decoders read their answer there, and want one in each row.
        tokens[torch.arange(_ROWS), mask.sum(dim=1) - 1] = end
    batch = {"input_ids": tokens, "attention_mask": mask}
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = draw()
    return batch


@torch.no_grad()
def _logits(model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
    given = dict(batch)
    if type(getattr(model, "get_base_model", lambda: model)()).__name__.endswith("ForSequenceClassification"):
        # It makes its decoder's input of the encoder's.
        given.pop("decoder_input_ids", None)
    outputs = model(**given)
    names = ("logits", "start_logits", "end_logits")
    return [outputs[name].float() for name in names if outputs.get(name) is not None]


def relative_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of any element, relative to the largest element of its tensor."""
    if len(found) != len(wanted) or not wanted:
        return float("inf")
    return max(
        float((mine - other).abs().max() / other.abs().max().clamp(min=1e-12))
        for mine, other in zip(found, wanted, strict=True)
    )


def _write(model: Any, adapter: Path, base: Base, out: Path, trust_remote_code: bool) -> None:
    """Writes beside the folder and renames it, so that half a model is never seen."""
    scratch = out.with_name(f".{out.name}.merging")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(scratch)
        place = str(adapter) if (adapter / "tokenizer_config.json").is_file() else base.name
        AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code).save_pretrained(scratch)
        scratch.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written ({' '.join(str(error).split())[:300]})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
