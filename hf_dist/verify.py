"""`hf-dist verify`: the same training on several splits and engines, compared number by number.

Every run is a real one, started as a user starts it: a subprocess with torchrun. The first split is the
reference. All runs train the same steps; a split `RxA` splits each of them into R ranks x A forward passes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hf_dist.errors import ConfigError, EngineError
from hf_dist.presets.catalogue import resolve

TOLERANCE = 1e-4
"""Largest relative difference of a loss or a gradient norm, and of the final weights (as one vector), that
counts as rounding unless another is asked for."""

# What a run needs to be comparable; the user's flags come after and win.
_FLAGS = (
    "--do_train",
    "--max_steps=30",
    "--dropout=0",
    "--logging_steps=1",
    "--logging_strategy=steps",
    "--eval_strategy=no",
    "--save_strategy=no",
    "--report_to=none",
    # One micro-batch a step, so that even one process without accumulation can hold it.
    "--max_tokens_per_device=1024",
    "--tokens_per_step=1024",
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to run the steps.

    Attributes:
        preset: The engine.
        ranks: Processes.
        accumulation: Forward passes of a rank in a step.
    """

    preset: str
    ranks: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.accumulation} {self.preset}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run left: one loss and gradient norm a step, and its weights' folder."""

    losses: list[float]
    grad_norms: list[float]
    tokens_per_second: float
    engine: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far a run is from the reference: the largest relative differences."""

    loss: float
    grad_norm: float
    weights: float

    def failures(self, tolerance: float = TOLERANCE) -> list[str]:
        """The quantities that disagree by more than `tolerance` (NaN does too)."""
        values = {"loss": self.loss, "gradient norm": self.grad_norm, "weights": self.weights}
        return [name for name, value in values.items() if not value <= tolerance]


def parse_splits(splits: str, presets: str) -> list[Split]:
    """All splits without DeepSpeed, then each preset on the split with the most ranks.

    Args:
        splits: As `1x1,1x4,2x2`: ranks x forward passes of a rank.
        presets: As `none,zero2`.

    Raises:
        ConfigError: For words that are no split or no preset.
    """
    shapes = []
    for word in splits.split(","):
        ranks, x, accumulation = word.strip().partition("x")
        if not (x and ranks.isdigit() and accumulation.isdigit() and int(ranks) and int(accumulation)):
            raise ConfigError(f"--splits holds {word!r}; expected RANKSxACCUMULATION, as in 1x1,1x4,2x2")
        shapes.append((int(ranks), int(accumulation)))
    names = [name.strip() for name in presets.split(",")]
    for name in names:
        resolve(name)
    found = [Split(preset="none", ranks=r, accumulation=a) for r, a in shapes]
    widest = max(shapes)
    found += [Split(preset=n, ranks=widest[0], accumulation=widest[1]) for n in names if n != "none"]
    return found


def recipe_file(recipe: str) -> Path:
    """The script of a recipe's name (`text_classification`, `text-classification`) or path.

    Names are those of `recipes/`, and those that installed packages give modules of theirs by entry points of
    the group `hf_dist.recipes`.

    Raises:
        ConfigError: If there is none, or more than one.
    """
    if recipe.endswith(".py"):
        path = Path(recipe)
        if not path.is_file():
            raise ConfigError(f"the recipe {path.absolute()} is not there; name one of recipes/ or its path")
        return path
    spec = importlib.util.find_spec("recipes")
    folder = Path(next(iter(spec.submodule_search_locations or []))) if spec else Path("recipes")
    own = {file.stem: file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"}
    points = entry_points(group="hf_dist.recipes")
    name = recipe.replace("-", "_")
    found = [own[name]] if name in own else []
    found += [_script_of(point) for point in points if point.name.replace("-", "_") == name]
    if not found:
        known = ", ".join(dict.fromkeys([*own, *(point.name for point in points)]))
        raise ConfigError(f"there is no recipe {recipe}; expected one of {known}")
    if len(found) > 1:
        paths = ", ".join(map(str, found))
        raise ConfigError(f"several recipes are named {recipe} ({paths}); name one by its path")
    return found[0]


def _script_of(point: EntryPoint) -> Path:
    """The file of the module that an entry point names; only the packages around it are imported.

    Raises:
        ConfigError: There is none.
    """
    try:
        spec = importlib.util.find_spec(point.module)
    except ImportError:
        spec = None
    if spec is None or not spec.has_location or spec.origin is None:
        raise ConfigError(
            f"the recipe {point.name} of an installed package is the module {point.module}, which is not "
            "there; mend or uninstall the package"
        )
    return Path(spec.origin)


def _command(script: Path, split: Split, flags: Sequence[str], output_dir: Path) -> list[str]:
    launcher = [sys.executable]
    if split.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={split.ranks}"]
    return [
        *launcher,
        str(script),
        *_FLAGS,
        *flags,
        f"--preset={split.preset}",
        f"--micro_batches_per_rank={split.accumulation}",
        f"--output_dir={output_dir}",
    ]


def train(script: Path, split: Split, flags: Sequence[str], output_dir: Path) -> Trained:
    """Runs one split to its end.

    Raises:
        EngineError: With the run's own error, if it fails.
    """
    environment = {**os.environ, "HF_DIST_NPROC": str(split.ranks)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        _command(script, split, flags, output_dir),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        said = errors[0].removeprefix("error: ") if errors else "\n".join(done.stderr.splitlines()[-20:])
        raise EngineError(f"the run {split} failed: {said}")
    results = json.loads((output_dir / "all_results.json").read_text(encoding="utf-8"))
    state = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    return Trained(
        losses=[entry["loss"] for entry in steps],
        grad_norms=[entry["grad_norm"] for entry in steps],
        tokens_per_second=results["train_tokens_per_second"],
        engine=results["engine"],
        folder=output_dir,
    )


def _largest_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    if len(values) != len(reference):
        return float("inf")
    differences = [
        abs(value - wanted) / max(abs(wanted), 1e-12) for value, wanted in zip(values, reference, strict=True)
    ]
    # max() would lose a NaN, depending on where it stands.
    return next((d for d in differences if math.isnan(d)), max(differences, default=0.0))


def _weights(folder: Path) -> dict[str, Any]:
    """The saved weights by the names that the model has for them once it is loaded.

    Names in the file may be others: transformers 5.24 writes a BERT that was trained under ZeRO-3 with the
    names of the original checkpoints (`LayerNorm.gamma`), and loads both.
    """
    import transformers
    from safetensors.torch import load_file

    config = folder / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.exists() else None
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is not None:
        # One bar a run says nothing beside our own line for it.
        transformers.utils.logging.disable_progress_bar()
        loaded = model_class.from_pretrained(folder).state_dict()
    else:
        files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        loaded = {name: tensor for file in files for name, tensor in file.items()}
    return {name: tensor.double() for name, tensor in loaded.items()}


def _without_copies(weights: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what `wanted` lacks and is a copy: DeepSpeed 0.19.8 saves tied weights once a name."""
    known = [tensor for name, tensor in weights.items() if name in wanted]
    return {
        name: tensor
        for name, tensor in weights.items()
        if name in wanted or not any(tensor.shape == k.shape and bool((tensor == k).all()) for k in known)
    }


def compare(trained: Trained, reference: Trained) -> Comparison:
    """Differences of a run from the reference.

    Weights are compared as one vector, |w - v| / |v|: the bias of attention's keys has a gradient of zero
    (softmax does not see it), which Adam scales up from rounding noise to full steps.
    """
    mine, wanted = _weights(trained.folder), _weights(reference.folder)
    mine = _without_copies(mine, wanted)
    if mine.keys() != wanted.keys():
        weights = float("inf")
    else:
        apart = sum(float((mine[name] - wanted[name]).square().sum()) for name in wanted)
        weights = (apart / sum(float(tensor.square().sum()) for tensor in wanted.values())) ** 0.5
    return Comparison(
        loss=_largest_difference(trained.losses, reference.losses),
        grad_norm=_largest_difference(trained.grad_norms, reference.grad_norms),
        weights=weights,
    )


def verify(
    recipe: str, *, splits: str, presets: str, flags: Sequence[str], tolerance: float = TOLERANCE
) -> bool:
    """Trains all splits, prints the table, and returns whether they agree to `tolerance` (relative).

    Raises:
        HfDistError: For bad arguments, or a run that fails.
    """
    from rich.console import Console
    from rich.table import Table

    if not tolerance > 0:
        raise ConfigError(f"--tolerance is {tolerance}; expected a positive relative difference, as 1e-5")
    script = recipe_file(recipe)
    planned = parse_splits(splits, presets)
    table = Table(
        "split", "engine", "last loss", "loss", "gradient norm", "weights", "tokens/s", "scaling", ""
    )
    failures = []
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="hf_dist-verify-") as scratch:
        reference: Trained | None = None
        for number, split in enumerate(planned):
            console.print(f"training {split} ...", highlight=False)
            trained = train(script, split, flags, Path(scratch) / str(number))
            reference = reference or trained
            found = compare(trained, reference)
            wrong = found.failures(tolerance)
            failures += [f"{split}: {name}" for name in wrong]
            per_rank = trained.tokens_per_second / (split.ranks / planned[0].ranks)
            table.add_row(
                f"{split.ranks}x{split.accumulation}",
                trained.engine,
                f"{trained.losses[-1]:.6f}",
                f"{found.loss:.1e}",
                f"{found.grad_norm:.1e}",
                f"{found.weights:.1e}",
                f"{trained.tokens_per_second:,.0f}",
                f"{per_rank / reference.tokens_per_second:.0%}",
                "differs: " + ", ".join(wrong) if wrong else "agrees",
            )
    console.print(table)
    console.print(
        f"loss, gradient norm, weights: largest relative difference from {planned[0]} "
        f"(at most {tolerance:g}); scaling: tokens/s per process, against {planned[0]}",
        highlight=False,
    )
    for failure in failures:
        console.print(f"DIFFERS: {failure}", highlight=False)
    return not failures
