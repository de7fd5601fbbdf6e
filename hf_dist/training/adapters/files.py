"""What lies beside a saved adapter, and how its base model is found again.

    adapter_config.json, adapter_model.safetensors    peft's own
    base/config.json                                  of the base model, with the labels of the new head
    base/generation_config.json                       how it generates, where it does
    base/model.safetensors                            only of a base that has no name (drawn from a config)

A base with a name is loaded by it. One without lies in the run's folder: `adapter_config.json` names the
folder by its whole path, for programs that know nothing of it, and here it is looked for beside the adapter
first, so that a run may be moved. Nothing here needs torch.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from hf_dist.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
BASE_FOLDER = "base"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class Base:
    """Where the base model of an adapter comes from.

    Attributes:
        name: Hub name or folder of the weights.
        revision: Branch, tag or commit on the hub.
        config: Hub name or folder of the config; it knows the labels of a head that the base doesn't have.
    """

    name: str
    revision: str
    config: str


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_of(folder: Path) -> Base:
    """Finds the base of the adapter in a folder.

    Raises:
        CheckpointError: If there is no adapter, or its base is nowhere.
    """
    try:
        saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        named, revision = saved["base_model_name_or_path"], saved.get("revision") or "main"
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no adapter ({ADAPTER_CONFIG} is missing); name the output folder of a run with "
            "--peft, or one of its checkpoints"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} can't be read ({error})") from None
    beside = folder / BASE_FOLDER
    name = named
    # A checkpoint's lies in the folder of its run.
    for place in (beside, folder.absolute().parent / BASE_FOLDER):
        if any((place / file).is_file() for file in _WEIGHTS):
            name = str(place)
            break
    if not name:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} names no base model, and {beside} holds none")
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise CheckpointError(
            f"the base model of {folder} is gone: {name} isn't there, and {beside} holds no weights; bring "
            "it back, or put it there"
        )
    return Base(
        name=name, revision=revision, config=str(beside) if (beside / "config.json").is_file() else name
    )


def has_no_name(base: str | None) -> bool:
    """Whether a base model is one that a run drew, or that was kept beside an adapter."""
    return base is None or (Path(base).name == BASE_FOLDER and is_adapter(Path(base).absolute().parent))


def keep_base(source: Path, folder: Path) -> Path:
    """Copies a base model that has no name into the folder of a run; returns its place."""
    place, scratch = folder / BASE_FOLDER, folder / f".{BASE_FOLDER}"
    if source.absolute() == place.absolute():
        return place.absolute()
    for old in (scratch, place):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.rename(place)
    return place.absolute()
