"""What a task offers: to the Trainer, and to a run that starts from nothing but settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from datasets import DatasetDict
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.tasks.items import Items


class TaskSpec(Protocol):
    """A task, as far as training and evaluation are concerned."""

    @property
    def items(self) -> Items:
        """The things that the loss sums over."""
        ...

    @property
    def best_metric(self) -> str:
        """Name of the score that says which checkpoint is best (without `eval_`)."""
        ...

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Pads examples into a batch that the model takes, labels included where the examples have them."""
        ...

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[Any]:
        """One small picklable object for each row of the batch (a class number, a list of tags)."""
        ...

    def score(self, predictions: list[Any], dataset: Any) -> dict[str, float]:
        """Scores of the predictions, which stand in the order of the data set's rows."""
        ...


@runtime_checkable
class RandomCollate(Protocol):
    """A task whose batches are drawn at random (masked LM), row by row.

    What a row gets must depend on (seed, epoch, row) only, so that it is the same however a step is split,
    with any number of workers, and in a resumed run. Without this method `TaskSpec.collate` is called.
    """

    def collate_rows(
        self, examples: list[dict[str, Any]], *, epoch: int, rows: Sequence[int]
    ) -> dict[str, Any]:
        """As `collate`, with the epoch (0 in evaluation) and the row number of each example."""
        ...


@runtime_checkable
class GeneratingTask(Protocol):
    """A task whose predictions are generated texts (summarization, translation)."""

    def generates(self, batch: Mapping[str, Any]) -> bool:
        """Whether those of this batch are."""
        ...

    def generate(self, model: Any, batch: Mapping[str, Any], *, synced: bool) -> list[Any]:
        """One small picklable object for each row of the batch, in place of `TaskSpec.predict`.

        Args:
            model: The model itself, without its wrapper.
            batch: As collated, labels included where there are any.
            synced: Whether all ranks must run the same number of forward passes (ZeRO-3); it is called on
                empty micro-batches too.
        """
        ...


@runtime_checkable
class PreparingTask(Protocol):
    """A task whose batches depend on the model (packing)."""

    def prepare_for(self, model: Any) -> None:
        """Called on all ranks together, once the engine is up and before the first batch is collated."""
        ...


@runtime_checkable
class PackingTask(Protocol):
    """A task that may join training rows before they are planned."""

    def pack(self, rows: Any, batching: Any, *, seed: int) -> Any | None:
        """The rows to train on in place of `rows`, with `lengths`; None to leave them as they are."""
        ...


class RecipeTask(TaskSpec, Protocol):
    """What a task adds to the Trainer's view of it: where its data, tokenizer and model come from."""

    name: ClassVar[str]
    auto_class: ClassVar[Any]
    settings_class: ClassVar[type]
    seed: int

    def __init__(self, settings: Any, *, pad_to_multiple_of: int) -> None:
        """Makes the task; `collate` pads rows to a multiple of so many tokens."""

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the raw splits."""

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Loads or trains the tokenizer."""

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """Makes the model's config; `load` has run."""

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises; returns the data sets and how many rows of each split were truncated."""

    def records(self, predictions: Sequence[Any], dataset: Any) -> Iterable[dict[str, Any]]:
        """What predictions.jsonl holds: one record an input example, in the order of the input."""

    def usage(self) -> str:
        """Lines of Python that load the saved model from the folder `FOLDER` and run it on an input."""
