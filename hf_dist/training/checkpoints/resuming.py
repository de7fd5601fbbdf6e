"""A Trainer that goes on from a checkpoint of any engine, on any number of processes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import set_seed

from hf_dist.errors import CheckpointError
from hf_dist.training.checkpoints import files, universal
from hf_dist.training.checkpoints.saving import SavingTrainer
from hf_dist.training.models.partitioned import gathered, is_partitioned, whole_shape
from hf_dist.training.ranks.gather import on_main

logger = logging.getLogger("hf_dist")

_CONVERTING = ".converting"
# torch's own optimizer writes the same on any number of processes.
_UNSHARDED = ("single", "ddp")


class ResumingTrainer(SavingTrainer):
    """Loads what another engine or another number of processes saved, converted in a scratch folder.

    Args:
        whole_model: Builds the model of a checkpoint folder, whole, on the CPU of one process.
        built_from: The checkpoint that the model was built from, if it was. The stock Trainer (transformers
            5.24) loads weights by the names in the file and leaves alone what it doesn't find, so that a
            mixture of experts, whose names change when it is saved, would keep its first weights.
        others: What `SavingTrainer` takes.
    """

    def __init__(
        self,
        *,
        whole_model: Callable[[Path], nn.Module] | None = None,
        built_from: Path | None = None,
        **others: Any,
    ) -> None:
        self._whole_model = whole_model
        self._built_from = built_from
        super().__init__(**others)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._built_from is None or Path(resume_from_checkpoint) != self._built_from:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Takes the steps between logs, evaluations and saves from the arguments.

        The stock Trainer (transformers 5.24) goes on with the checkpoint's, whatever the run now says.
        """
        position = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self.state.compute_steps(self.args, max_steps)
        return position

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        foreign = resume_from_checkpoint is not None and self._is_foreign(Path(resume_from_checkpoint))
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, None if foreign else resume_from_checkpoint
        )
        if foreign and resume_from_checkpoint is not None:
            self._take_over(Path(resume_from_checkpoint))
        if resume_from_checkpoint is not None:
            self._follow_new_length(Path(resume_from_checkpoint), max_steps)
        return prepared

    def _follow_new_length(self, checkpoint: Path, max_steps: int) -> None:
        """Sets the learning rate of the next step by a schedule whose length has changed.

        What the checkpoint saved for it is of the old length: 0 at the end of a linear one. The stock Trainer
        (transformers 5.24) spends a step on that.
        """
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if state["max_steps"] == max_steps or not isinstance(schedule, LambdaLR):
            return
        assert self.optimizer is not None
        schedule._last_lr = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate

    def _is_foreign(self, checkpoint: Path) -> bool:
        """Whether another engine or, sharded, another number of processes wrote a checkpoint."""
        if self.engine_name is None:
            return False
        facts = files.facts_of(checkpoint)
        saved = facts.get("engine", self.engine_name)
        if {saved, self.engine_name} <= set(_UNSHARDED):
            return False
        return (saved, facts.get("world_size")) != (self.engine_name, self.args.world_size)

    def _take_over(self, checkpoint: Path) -> None:
        facts = files.facts_of(checkpoint)
        logger.info(
            "%s was saved by %s on %s process(es); it is converted to %s on %d",
            checkpoint,
            facts.get("engine"),
            facts.get("world_size"),
            self.engine_name,
            self.args.world_size,
        )
        if not (checkpoint / "scheduler.pt").is_file():
            raise CheckpointError(
                f"{checkpoint} holds no scheduler.pt: its schedule is that of a DeepSpeed JSON; go on with "
                "the preset and processes it was made with"
            )
        folder = Path(self.args.output_dir or ".") / _CONVERTING
        assert self.optimizer is not None and self.lr_scheduler is not None
        groups = len(self.optimizer.param_groups)
        try:
            on_main(lambda: self._convert(checkpoint, folder, groups))
            if self.is_deepspeed_enabled:
                universal.load_into_deepspeed(folder, self.model_wrapped, global_step=self.state.global_step)
            else:
                inner = getattr(self.optimizer, "optimizer", self.optimizer)
                universal.load_into_torch(folder, self._network, inner)
            self.accelerator.wait_for_everyone()
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(folder, ignore_errors=True)
        schedule = torch.load(checkpoint / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)
        rates = self.lr_scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _convert(self, checkpoint: Path, folder: Path, groups: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        needed = 2 * files.size_of(checkpoint)
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
            raise CheckpointError(
                f"{folder.parent} has {free / 1e6:,.0f} MB free and converting {checkpoint} needs "
                f"{needed / 1e6:,.0f} MB: free space, or go on with the preset and processes it was made "
                "with"
            )
        folder.mkdir(parents=True)
        sharded = universal.is_sharded(checkpoint)
        weights = {} if sharded else dict(self._build_whole(checkpoint).named_parameters())
        universal.write_universal(
            checkpoint,
            folder,
            shapes=self._trained_shapes(),
            weights={name: weight.detach() for name, weight in weights.items()},
        )
        universal.for_deepspeed(folder, groups)

    def _build_whole(self, checkpoint: Path) -> nn.Module:
        if self._whole_model is None:
            raise CheckpointError(
                f"{checkpoint} is of another engine and this Trainer was not told how to build its model"
            )
        return self._whole_model(checkpoint)

    def _trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters in the order of the Trainer's optimizer: decayed ones first."""
        decayed = set(self.get_decay_parameter_names(self._network))
        trained = {
            name: whole_shape(weight)
            for name, weight in self._network.named_parameters()
            if weight.requires_grad
        }
        return {name: trained[name] for name in sorted(trained, key=lambda name: name not in decayed)}

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores this rank's random state; on another number of processes each rank starts a new one."""
        if checkpoint is not None and (Path(checkpoint) / files.MANIFEST).exists():
            saved = files.facts_of(Path(checkpoint)).get("world_size", self.args.world_size)
            if saved != self.args.world_size:
                set_seed(self.args.seed + 1_000_003 * self.state.global_step + self.args.process_index)
                return
        super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        """Loads the best weights by the names of the model, whatever engine saved them."""
        best = self.state.best_model_checkpoint
        if self._whole_model is None or best is None:
            super()._load_best_model()
            return
        whole = self._whole_model
        loaded: list[dict[str, Tensor]] = []
        on_main(lambda: loaded.append(dict(whole(Path(best)).named_parameters())))
        self._set_weights(loaded[0] if loaded else {})

    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        """Gives the weights that rank 0 holds to all ranks, one by one."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        for name, parameter in self._network.named_parameters():
            if not parameter.requires_grad:
                # A frozen one is what it was.
                continue
            with gathered([parameter]), torch.no_grad():
                if self.is_world_process_zero():
                    parameter.data.copy_(weights[name])
                if several and not is_partitioned(parameter):
                    dist.broadcast(parameter.data, src=0)
