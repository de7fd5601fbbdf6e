"""A Trainer whose checkpoints appear whole or not at all.

The stock Trainer (transformers 5.24) writes into the final folder, file by file, and removes older ones by
itself; whoever is killed in between is left with a torn newest checkpoint, which a stock resume takes.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from torch import nn

from hf_dist.errors import CheckpointError, HfDistError
from hf_dist.training.adapters import lora
from hf_dist.training.checkpoints import files
from hf_dist.training.checkpoints.copies import Copies
from hf_dist.training.models.partitioned import whole_numel
from hf_dist.training.ranks.gather import on_main
from hf_dist.training.steps.evaluation import EvaluatingTrainer

logger = logging.getLogger("hf_dist")

# Room beyond the bytes of the checkpoint before.
_SPARE = 1.05


class SavingTrainer(EvaluatingTrainer):
    """Saves beside, seals, renames; then removes what is one too many.

    A save that fails for want of space leaves the earlier checkpoints alone and the training running; only
    the last one is an error.

    Args:
        run_facts: What a checkpoint says of the run that wrote it (model, data, tokenizer, plan).
        engine_name: Name of the engine that runs (see `running_engine.Engine`); a checkpoint says that, too.
        copies: Where rank 0 copies each whole checkpoint to.
        others: What `EvaluatingTrainer` takes.
    """

    def __init__(
        self,
        *,
        run_facts: Mapping[str, Any] | None = None,
        engine_name: str | None = None,
        copies: Copies | None = None,
        **others: Any,
    ) -> None:
        self.run_facts: dict[str, Any] = dict(run_facts or {})
        self.engine_name = engine_name
        self.copies = copies
        self._scratch: Path | None = None
        self._last_size: int | None = None
        super().__init__(**others)

    def _get_output_dir(self, trial: Any) -> str:
        """Where the stock Trainer puts `checkpoint-N`: beside its place while it is written."""
        return super()._get_output_dir(trial) if self._scratch is None else str(self._scratch)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(super()._get_output_dir(trial))
        step = self.state.global_step
        place = run_dir / f"checkpoint-{step}"
        best_before = self.state.best_model_checkpoint
        best_step = self.state.best_global_step
        if best_step == step:
            self.state.best_model_checkpoint = str(place)
        try:
            on_main(lambda: _guarded(lambda: self._make_room(run_dir)))
            self._scratch = run_dir / files.SCRATCH
            # The stock method looks for the best one in the scratch folder, behind a barrier of its own.
            self.state.best_global_step = None
            super()._save_checkpoint(model, trial)
            self.state.best_global_step = best_step
            self.accelerator.wait_for_everyone()
            on_main(lambda: _guarded(lambda: self._publish(run_dir, place)))
        except (OSError, RuntimeError, SafetensorError, CheckpointError) as error:
            self.state.best_model_checkpoint = best_before
            if self.is_world_process_zero():
                shutil.rmtree(run_dir / files.SCRATCH, ignore_errors=True)
            if not _is_about_storage(error):
                raise
            if step >= self.state.max_steps:
                raise _cant_save(place, error) from error
            logger.warning(
                "checkpoint-%d could not be saved (%s); training goes on, the earlier checkpoints are whole, "
                "and the next save tries again",
                step,
                error,
            )
        finally:
            self._scratch = None
            self.state.best_global_step = best_step

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Saves the model; beside an adapter, what is needed to load its base again."""
        super()._save(output_dir, state_dict)
        if self.args.should_save and isinstance(self.model, PeftModel):
            lora.save_beside(self.model, Path(output_dir or self.args.output_dir or "."))

    def _make_room(self, run_dir: Path) -> None:
        """Empties the scratch folder; checks that there is space for another checkpoint."""
        scratch = run_dir / files.SCRATCH
        run_dir.mkdir(parents=True, exist_ok=True)
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
        free = shutil.disk_usage(run_dir).free
        needed = int(_SPARE * (self._last_size or self._least_size()))
        if free < needed:
            raise CheckpointError(
                f"{run_dir} has {free / 1e6:,.0f} MB free and a checkpoint needs {needed / 1e6:,.0f} MB: "
                "free some space, lower --save_total_limit, or name an --output_dir elsewhere"
            )

    def _least_size(self) -> int:
        """Bytes of the weights and, where they are saved, two moments of each trained one."""
        weights = moments = 0
        adapter = isinstance(self.model, PeftModel)
        for parameter in self._network.parameters():
            if adapter and not parameter.requires_grad:
                continue
            count = whole_numel(parameter)
            weights += count * parameter.element_size()
            moments += 8 * count if parameter.requires_grad else 0
        return weights + (0 if self.args.save_only_model else moments)

    def _publish(self, run_dir: Path, place: Path) -> None:
        folder = run_dir / files.SCRATCH / place.name
        # Written again: only now is it known which checkpoint is the best.
        self.state.save_to_json(str(folder / "trainer_state.json"))
        facts = {
            **self.run_facts,
            "step": self.state.global_step,
            "epoch": self.state.epoch,
            "world_size": self.args.world_size,
            **({} if self.engine_name is None else {"engine": self.engine_name}),
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        files.seal(folder, facts)
        files.publish(folder, place)
        shutil.rmtree(run_dir / files.SCRATCH, ignore_errors=True)
        self._last_size = files.size_of(place)
        best = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        staying = [] if best is None else [best]
        if self.copies is not None:
            self.copies.start(place, best)
            staying += self.copies.pending()
        files.rotate(run_dir, self.args.save_total_limit, staying)


def _guarded(work: Callable[[], None]) -> None:
    """Turns what the disk says into an error that travels to the other ranks as it is."""
    try:
        work()
    except HfDistError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")) from error


def _is_about_storage(error: BaseException) -> bool:
    # torch's writer and safetensors wrap what the disk said in errors of their own.
    if isinstance(error, (OSError, CheckpointError, SafetensorError)):
        return True
    wrapped = ("PytorchStreamWriter", "file write failed", "inline_container")
    return any(words in str(error) for words in wrapped)


def _cant_save(place: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{place} could not be saved ({' '.join(str(error).split())}); the earlier checkpoints are whole: "
        "make room or mend the folder, then start again with the same --output_dir"
    )
