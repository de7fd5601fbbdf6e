"""The model card: what a stranger who finds the folder needs to use, judge and repeat the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dist.config import DataConfig, RunConfig
from hf_dist.training.adapters.files import has_no_name
from hf_dist.training.run.output import package_versions

CARD_FILE = "README.md"
_WHOLE = "`FOLDER` is the path of this folder, or its name on the hub."
_ADAPTER = (
    "`FOLDER` is the path of this folder (from the hub: `huggingface_hub.snapshot_download(name)`). It "
    "holds an adapter, which the code merges into its base model once, as `hf-dist merge` does."
)
_SHOWN_CLASSES = 50


def describe_data(data: DataConfig) -> str:
    """Where the data came from, in words."""
    if data.dataset_name is not None:
        parts = [data.dataset_name, data.dataset_config_name, data.dataset_revision]
        return "`" + " / ".join(part for part in parts if part) + "`"
    named = [data.train_file, data.validation_file, data.test_file]
    files = [Path(file).name for file in named if file is not None]
    if files:
        return ", ".join(f"`{file}`" for file in files)
    return "Python's standard library (built in)"


def model_card(
    *,
    task: str,
    usage: str,
    config: RunConfig,
    rows: Mapping[str, int],
    results: Mapping[str, Any],
    classes: Sequence[str],
    auto_class: str = "AutoModel",
) -> str:
    """The text of the card.

    Args:
        task: Name of the recipe.
        usage: Lines of Python that run the model from the folder `FOLDER`.
        config: The resolved config.
        rows: Rows of each split, once encoded.
        results: What all_results.json holds.
        classes: Names of the classes that the task found; none for one without.
        auto_class: The transformers class that loads the model.
    """
    adapter = config.peft.trains_adapter
    if adapter:
        usage = _merging(config, auto_class) + usage.replace("FOLDER", "MERGED")
    base = config.model.model_name_or_path
    counted = ", ".join(f"{count:,} {split}" for split, count in rows.items())
    origin = f"Fine-tuned from `{base}`" if base is not None else "Trained from nothing"
    named = ""
    if classes:
        shown = [f"`{name}`" for name in classes[:_SHOWN_CLASSES]]
        named = f"\n\nLabels: {', '.join(shown)}{', ...' if len(classes) > len(shown) else ''}."
    settings = {
        block: {name: value for name, value in values.items() if _belongs(name, value)}
        for block, values in config.as_dict().items()
        if values
    }
    versions = [f"- {name} {found}" for name, found in package_versions().items()]
    head = yaml.safe_dump(_head(task, config), sort_keys=False)
    return (
        f"---\n{head}---\n\n"
        f"# {task.replace('_', ' ').capitalize()}\n\n"
        f"{origin} with hf_dist, recipe `{task}`.{named}\n\n"
        f"## Use\n\n```python\n{usage}```\n\n"
        f"{_ADAPTER if adapter else _WHOLE}\n\n"
        f"## Data\n\n{describe_data(config.data)}; rows: {counted}.\n\n"
        "## Scores\n\nOn the validation data:\n\n| score | value |\n|---|---|\n"
        + "\n".join(_score_rows(results))
        + "\n\n## Settings\n\n"
        f"Engine `{results.get('engine')}`, {results.get('world_size')} process(es).\n\n"
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n\n"
        "## Versions\n\n" + "\n".join(versions) + "\n"
    )


def _head(task: str, config: RunConfig) -> dict[str, Any]:
    """What the hub reads of the card; names of this machine are none of its business."""
    library = "peft" if config.peft.trains_adapter else "transformers"
    head: dict[str, Any] = {"library_name": library, "tags": ["hf_dist", task.replace("_", "-")]}
    base, dataset = config.model.model_name_or_path, config.data.dataset_name
    if base is not None and not Path(base).exists():
        head["base_model"] = base
    if dataset is not None and not Path(dataset).exists():
        head["datasets"] = [dataset]
    return head


def _score_rows(results: Mapping[str, Any]) -> list[str]:
    """Rows of the table of scores, sorted by name."""
    technical = ("_runtime", "_per_second", "_preparation_time")
    return [
        f"| {name.removeprefix('eval_')} | {value:.6g} |"
        for name, value in sorted(results.items())
        if name.startswith("eval_") and isinstance(value, int | float) and not name.endswith(technical)
    ]


def _merging(config: RunConfig, auto_class: str) -> str:
    """Lines of Python that merge the adapter in `FOLDER` into its base, as the folder `MERGED`.

    Not left to `from_pretrained(FOLDER)`: transformers 5.24 loses the labels of a new head on a named base,
    and the magnitudes of DoRA.
    """
    name, options = config.model.model_name_or_path, ""
    base = 'FOLDER + "/base"' if has_no_name(name) else repr(name)
    if not has_no_name(name) and config.model.model_revision != "main":
        options += f", revision={config.model.model_revision!r}"
    if config.model.new_head:
        options += ", ignore_mismatched_sizes=True"
    more = decoding = resizing = ""
    if config.model.resize_embeddings:
        resizing = (
            "base.resize_token_embeddings(max(len(tokenizer), base.get_input_embeddings().num_embeddings))\n"
        )
    if auto_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
        more = ", GenerationConfig"
        decoding = 'base.generation_config = GenerationConfig.from_pretrained(FOLDER + "/base")\n'
    return (
        "from peft import PeftModel\n"
        f"from transformers import AutoConfig, {auto_class}, AutoTokenizer{more}\n\n"
        'config = AutoConfig.from_pretrained(FOLDER + "/base")\n'
        f"base = {auto_class}.from_pretrained({base}, config=config{options})\n"
        f"{decoding}"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
        f"{resizing}"
        'MERGED = FOLDER.rstrip("/") + "-merged"\n'
        "PeftModel.from_pretrained(base, FOLDER).merge_and_unload().save_pretrained(MERGED)\n"
        "tokenizer.save_pretrained(MERGED)\n\n"
    )


def _belongs(name: str, value: Any) -> bool:
    """Whether a setting says something of the model: paths and names of this machine don't, nor secrets."""
    private = ("output_dir", "run_name", "logging_dir", "dump_batches", "hub_token", "hub_model_id")
    return value is not None and name not in private and not name.endswith("_file")
