"""From a task and a config to a trained model: the order of a run.

config -> engine's environment -> data and tokens (no process group yet) -> plan -> TrainingArguments
-> model -> Trainer -> train. TrainingArguments come after the plan, since DeepSpeed keeps the
accumulation it was built with, and before the model, since zero.Init reads a global that they set.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hf_dist.config import RunConfig
from hf_dist.errors import exit_on_error
from hf_dist.training.engines import lifecycle as engines
from hf_dist.training.engines.conflicts import refuse_conflicts
from hf_dist.training.engines.running import expected_engine
from hf_dist.training.flags.parsing import parse
from hf_dist.training.models.compilation import compiles, prepare_compilation
from hf_dist.training.ranks.stopping import Interrupted
from hf_dist.training.run import output
from hf_dist.training.run.building import make_arguments, make_task, make_trainer
from hf_dist.training.run.data import RunData, RunSteps, load_data, plan_steps
from hf_dist.training.run.finished import Continuation, FinishedRun, look_at_folder, starts_afresh
from hf_dist.training.run.recipe import Recipe
from hf_dist.training.run.settings import log_on_rank_0, resolve
from hf_dist.training.run.start import choose_start
from hf_dist.training.steps.plan import total_steps, with_logging_steps
from hf_dist.training.steps.spec import RecipeTask


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run that stops behind its plan: `run` shows the settings, the steps and the engine."""

    config: RunConfig
    steps: RunSteps
    world_size: int

    def run(self) -> None:
        """Prints them, on rank 0."""
        if os.environ.get("RANK", "0") != "0":
            return
        config, plan, report = self.config, self.steps.plan, self.steps.report
        print(yaml.safe_dump(config.as_dict(), sort_keys=False).rstrip())
        print()
        if plan is not None and report is not None:
            total = total_steps(plan, config.training_arguments)
            print(f"steps: {total} ({plan.steps_per_epoch} an epoch)")
            print("\n".join(report.lines()))
        print(f"engine: {expected_engine(config.engine.preset).name} ({self.world_size} process(es))")


def _begin(task_class: type[RecipeTask], given: RunConfig, *, dry_run: bool) -> Recipe | FinishedRun | DryRun:
    """The order of a run, up to the first step; what follows is `Recipe.run`."""
    log_on_rank_0(given.notes)
    config, world_size = resolve(given), int(os.environ.get("WORLD_SIZE", "1"))
    before = look_at_folder(task_class.name, config, world_size)
    if isinstance(before, FinishedRun):
        return before
    task = make_task(task_class, config)
    _prepare_engine(config)
    data = load_data(task, config)
    config, steps = _settle_steps(task, config, data, world_size, before)
    if dry_run:
        return DryRun(config=config, steps=steps, world_size=world_size)
    arguments = make_arguments(task, config, steps)
    output_dir, lock = output.choose(config, task.name, arguments)
    start = choose_start(task, config, data, steps, arguments, output_dir=output_dir, goes_on=before)
    model = start.make_model(output_dir)
    trainer = make_trainer(task, config, data, steps, arguments, start=start, model=model)
    return Recipe(
        task=task,
        config=config,
        model=model,
        tokenizer=data.tokenizer,
        datasets=data.splits,
        collator=task.collate,
        plan=steps.plan,
        report=steps.report,
        trainer=trainer,
        output_dir=output_dir,
        lock=lock,
        checkpoint=start.checkpoint,
        afresh=starts_afresh(config),
    )


def _prepare_engine(config: RunConfig) -> None:
    """The environment that the engine and the compiler read, once and early."""
    engines.prepare_environment(config.engine.preset)
    if compiles(config.training_arguments):
        prepare_compilation()


def _settle_steps(
    task: RecipeTask, config: RunConfig, data: RunData, world_size: int, goes_on: Continuation | None
) -> tuple[RunConfig, RunSteps]:
    """Plans the steps, and settles what depends on them."""
    steps = plan_steps(task, config, data, world_size=world_size, goes_on=goes_on)
    arguments = config.training_arguments
    if arguments.get("do_train"):
        config = with_logging_steps(config, total_steps(steps.plan, arguments))
    refuse_conflicts(
        config.engine.preset, {**arguments, **steps.arguments}, optim_from_json=config.engine.optim_from_json
    )
    return config, steps


def assemble(task: type[RecipeTask], config: RunConfig) -> Recipe | FinishedRun:
    """Builds everything a run needs, up to the Trainer; nothing is trained.

    Where a run of the same settings was finished in the folder nothing is built, and `run` gives its results.

    Raises:
        HfDistError: For bad settings, data or engines, before any of them is half used.
    """
    begun = _begin(task, config, dry_run=False)
    assert not isinstance(begun, DryRun)
    return begun


def run_recipe(
    task: type[RecipeTask],
    *,
    description: str,
    defaults: Mapping[str, Any],
    argv: Sequence[str] | None = None,
) -> None:
    """The `main` of a recipe: parse, assemble, run; errors a user can act on become one line."""

    def main() -> None:
        config = parse(
            sys.argv[1:] if argv is None else argv,
            recipe=task.name,
            description=description,
            defaults=defaults,
            settings_class=task.settings_class,
        )
        # What is there now stays: it is not walked through each time that the collector looks at everything.
        gc.freeze()
        begun = _begin(task, config, dry_run=config.training.dry_run)
        try:
            begun.run()
        except Interrupted:
            engines.shutdown()
            raise
        if isinstance(begun, Recipe):
            engines.shutdown()

    exit_on_error(main)
