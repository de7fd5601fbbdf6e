"""What a training starts from: a checkpoint, if there is one to go on from, and the model that it gives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from hf_dist.config import LoopConfig, RunConfig
from hf_dist.errors import CheckpointError
from hf_dist.training.adapters import lora
from hf_dist.training.checkpoints import files as checkpoint_files
from hf_dist.training.checkpoints.copies import Copies
from hf_dist.training.checkpoints.facts import run_facts
from hf_dist.training.engines.lifecycle import check_space, outside_zero_init
from hf_dist.training.models.initial import load_model
from hf_dist.training.models.partitioned import whole_numel
from hf_dist.training.ranks.gather import on_main
from hf_dist.training.run.data import RunData, RunSteps
from hf_dist.training.run.finished import Continuation, starts_afresh
from hf_dist.training.steps.spec import RecipeTask

logger = logging.getLogger("hf_dist")


def choose_checkpoint(
    loop: LoopConfig,
    output_dir: Path,
    facts: Mapping[str, Any],
    limit: int | None,
    *,
    afresh: bool = False,
    finished: Continuation | None = None,
) -> tuple[Path | None, Copies | None]:
    """The checkpoint to go on from, and (on rank 0) the place that checkpoints are copied to.

    Rank 0 looks: on another node the folder may not be there, or not yet.

    Args:
        loop: Its `resume` says which: "auto" (the newest whole one, if there is one, here or among the
            copies), "never", or the path of one.
        output_dir: Folder of the run.
        facts: What must agree (see `run_facts`).
        limit: Copies to keep.
        afresh: As if `resume` were "never".
        finished: The run that was finished in the folder and is to go on.

    Raises:
        CheckpointError: If the named one is damaged, or the one that was found is of another run, or a
            finished run left none.
        ConfigError: If the place of the copies can't be used.
    """
    opened: list[Copies] = []

    def choose() -> Path | None:
        if loop.checkpoint_copy is not None:
            opened.append(Copies(loop.checkpoint_copy, limit=limit))
        if loop.resume == "never" or afresh:
            for copies in opened:
                copies.refuse_old_ones()
            return None
        if loop.resume == "auto":
            found = _newest(output_dir, opened[0] if opened else None)
        else:
            found = checkpoint_files.named(Path(loop.resume))
        if found is None and finished is not None:
            raise CheckpointError(
                f"{output_dir} holds a run that finished at step {finished.step} and no whole checkpoint to "
                "go on from; name another folder, or say --overwrite_output_dir to train afresh in this one"
            )
        if found is None:
            return None
        checkpoint_files.refuse_other_run(found, facts)
        logger.info("resuming from %s", found.path)
        if finished is not None:
            _say_how_it_goes_on(finished.step, found.step)
        return found.path

    checkpoint = on_main(choose)
    return checkpoint, (opened[0] if opened else None)


def _say_how_it_goes_on(ended: int, begins: int) -> None:
    again = (
        "" if begins >= ended else f"steps {begins + 1} to {ended} left no checkpoint and are trained again; "
    )
    logger.info(
        "the run was finished at step %d and goes on; %sthe learning rate follows the schedule of the new "
        "length",
        ended,
        again,
    )


def _newest(output_dir: Path, copies: Copies | None) -> checkpoint_files.Checkpoint | None:
    """The newest whole checkpoint; one that only the copies have is brought back."""
    found, passed = checkpoint_files.newest_whole(output_dir)
    for line in passed:
        logger.warning("%s", line)
    fetched = None if copies is None else copies.fetch(output_dir, newer_than=found)
    return fetched or found


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Builds the model of a run, with its adapter where the config asks for one.

    Attributes:
        config: The whole config.
        model_config: The model's.
        auto_class: The transformers auto class of the task.
        tokens: Tokens of the tokenizer.
        seed: Draws what is drawn.
        trains: Whether it is trained, and not only evaluated.
    """

    config: RunConfig
    model_config: PretrainedConfig
    auto_class: Any
    tokens: int
    seed: int
    trains: bool

    def build(self, checkpoint: Path | None) -> Any:
        """The model of a checkpoint, or as training starts."""
        model_config, model = self.model_config, self.config.model
        # Of a run with an adapter a checkpoint holds only that.
        whole = None if self.config.peft.trains_adapter else checkpoint
        loaded = load_model(
            model_config,
            self.auto_class,
            model,
            seed=self.seed,
            checkpoint=whole,
            tokens=self.tokens,
            complete=not self.trains and not self.config.peft.trains_adapter,
            options=lora.load_options(self.config.peft, self.config.training_arguments),
        )
        return lora.wrap(
            loaded.model,
            self.auto_class,
            self.config,
            seed=self.seed,
            drawn=loaded.drawn,
            trains=self.trains,
            checkpoint=checkpoint,
            base_rows=model_config.get_text_config().vocab_size if model.resize_embeddings else None,
        )

    def build_whole(self, checkpoint: Path) -> Any:
        """The model of a checkpoint, not partitioned: one process may call it alone."""
        with outside_zero_init():
            return self.build(checkpoint)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts from.

    Attributes:
        facts: What a checkpoint must agree with (see `run_facts`).
        checkpoint: The one that training goes on from.
        copies: On rank 0, the place that checkpoints are copied to.
        builder: Builds the model.
    """

    facts: dict[str, Any]
    checkpoint: Path | None
    copies: Copies | None
    builder: ModelBuilder

    def make_model(self, output_dir: Path) -> PreTrainedModel:
        """The model, with its adapter, where the engine has room for it.

        Raises:
            HfDistError: If it can't be loaded, or doesn't fit.
        """
        builder = self.builder
        model = builder.build(self.checkpoint)
        lora.prepare(model, builder.config, output_dir=output_dir, trains=builder.trains)
        check_space(builder.config.engine.preset, sum(map(whole_numel, model.parameters())))
        return model


def choose_start(
    task: RecipeTask,
    config: RunConfig,
    data: RunData,
    steps: RunSteps,
    arguments: TrainingArguments,
    *,
    output_dir: Path,
    goes_on: Continuation | None,
) -> Start:
    """Looks for a checkpoint, where something is trained; the model isn't built yet.

    Raises:
        CheckpointError: See `choose_checkpoint`.
        ConfigError: If the place of the copies can't be used.
    """
    facts = {
        **run_facts(data.model_config, data.tokenizer, data.splits.get("train"), steps.plan),
        "adapter": lora.facts(config.peft),
    }
    checkpoint, copies = None, None
    if arguments.do_train:
        checkpoint, copies = choose_checkpoint(
            config.training,
            output_dir,
            facts,
            arguments.save_total_limit,
            afresh=starts_afresh(config),
            finished=goes_on,
        )
    builder = ModelBuilder(
        config=config,
        model_config=data.model_config,
        auto_class=task.auto_class,
        tokens=len(data.tokenizer),
        seed=arguments.seed,
        trains=arguments.do_train,
    )
    return Start(facts=facts, checkpoint=checkpoint, copies=copies, builder=builder)
