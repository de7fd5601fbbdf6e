"""A training state that knows no engine: one folder a parameter, holding its fp32 value and its moments.

The format is DeepSpeed's universal checkpoint (`zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt`), which its
ZeRO optimizers load on any number of processes. DeepSpeed converts what ZeRO wrote; what torch's optimizer
wrote is written out here, and read back into it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_dist.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIMIZER_FILE = "optimizer.pt"
# What DeepSpeed's loaders read beside the parameters.
_GLOBAL_FILE = "optimizer_state.pt"
_STEP_FILE = "hf_dist_step.pt"


def is_sharded(checkpoint: Path) -> bool:
    """Whether DeepSpeed wrote the optimizer's state of this checkpoint."""
    return (checkpoint / "latest").is_file()


def write_universal(
    checkpoint: Path, folder: Path, *, shapes: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor]
) -> None:
    """Brings the state of a checkpoint into the universal format; one process does it for all.

    Args:
        checkpoint: A whole checkpoint of any engine.
        folder: An empty folder.
        shapes: The trained parameters' names, in the order of torch's optimizer, and shapes.
        weights: The trained parameters by name, in fp32; read where the checkpoint is not sharded.

    Raises:
        CheckpointError: If the state isn't that of an Adam, or not of these parameters.
    """
    if is_sharded(checkpoint):
        _from_deepspeed(checkpoint, folder, shapes)
    else:
        _from_torch(checkpoint, folder, shapes, weights)


def _from_torch(
    checkpoint: Path, folder: Path, shapes: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor]
) -> None:
    state = torch.load(checkpoint / _OPTIMIZER_FILE, map_location="cpu", weights_only=True)["state"]
    if len(state) != len(shapes):
        raise CheckpointError(
            f"{checkpoint}: its optimizer holds {len(state)} parameters and this model trains {len(shapes)}; "
            "go on with the settings it was made with"
        )
    step: Any = 0
    for number, (name, shape) in enumerate(shapes.items()):
        moments = state[number]
        whole = {"fp32": weights[name].float(), **{key: moments.get(key) for key in _MOMENTS}}
        for key, value in whole.items():
            if not torch.is_tensor(value) or tuple(value.shape) != tuple(shape):
                raise _not_adam(checkpoint)
            place = folder / "zero" / name
            place.mkdir(parents=True, exist_ok=True)
            torch.save({"param": value.clone()}, place / f"{key}.pt")
        step = moments["step"]
    _write_step(folder, step)


def _from_deepspeed(checkpoint: Path, folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    from deepspeed.checkpoint import ds_to_universal

    source = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    if (source / "offloaded_tensors").exists():
        raise CheckpointError(
            f"{checkpoint} holds its optimizer's state as it lay on the NVMe, which can't be converted; go "
            "on with the same preset and the same number of processes"
        )
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(source),
                    output_folder=str(folder),
                    # In this process: others would import everything anew.
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
    except KeyError as error:
        raise _not_adam(checkpoint) from error
    _write_step(folder, _step_of(folder))
    for name, shape in shapes.items():
        for key in ("fp32", *_MOMENTS):
            _give_shape(folder / "zero" / name / f"{key}.pt", tuple(shape))


def _give_shape(path: Path, shape: tuple[int, ...]) -> None:
    """DeepSpeed writes flat, bare tensors of what was ZeRO-3; its own ZeRO-1 and 2 can't read them."""
    found = torch.load(path, map_location="cpu", weights_only=False)
    if torch.is_tensor(found):
        torch.save({"param": found.reshape(shape).clone()}, path)


def _step_of(folder: Path) -> Any:
    """The number of updates that an Adam of DeepSpeed or torch has made (each keeps it elsewhere)."""
    for path in (folder / "zero").rglob("step.pt"):
        return torch.load(path, weights_only=False)
    saved = torch.load(folder / "zero" / _GLOBAL_FILE, weights_only=False)
    states = saved.get("optimizer_state_dict", {}).get("state", {})
    found = [state["step"] for state in states.values() if "step" in state]
    found += [group["step"] for group in saved.get("param_groups", ()) if "step" in group]
    if not found:
        raise CheckpointError("the checkpoint doesn't say how many updates its optimizer has made")
    return found[0]


def _write_step(folder: Path, step: Any) -> None:
    torch.save(torch.as_tensor(float(step)), folder / _STEP_FILE)


def _step(folder: Path) -> Tensor:
    return torch.load(folder / _STEP_FILE, weights_only=True)


def load_into_torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sets a model's trained parameters and the state of torch's optimizer over them.

    Args:
        folder: What `write_universal` wrote.
        model: Without its wrapper.
        optimizer: Over its parameters, themselves.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    step = _step(folder)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            place = folder / "zero" / names[id(parameter)]
            with torch.no_grad():
                parameter.copy_(_read(place / "fp32.pt"))
            state = optimizer.state[parameter]
            state["step"] = _step_beside(parameter, step, group)
            for key in _MOMENTS:
                state[key] = _read(place / f"{key}.pt").to(device=parameter.device, dtype=parameter.dtype)


def _step_beside(parameter: Tensor, step: Tensor, settings: Mapping[str, Any]) -> Tensor:
    # torch keeps the count on the CPU also for a model on a GPU, unless one kernel does it all.
    on_device = settings.get("fused") or settings.get("capturable")
    return step.clone().to(parameter.device if on_device else "cpu")


def _read(path: Path) -> Tensor:
    # DeepSpeed pickles objects of its own beside the tensor; this file was made a moment ago, by this run.
    whole: Tensor = torch.load(path, map_location="cpu", weights_only=False)["param"]
    return whole


def load_into_deepspeed(folder: Path, engine: Any, *, global_step: int) -> None:
    """Sets the parameters and the optimizer's state of a DeepSpeed engine; all ranks call it.

    Args:
        folder: What `write_universal` wrote; every rank can read it.
        engine: DeepSpeed's engine, ZeRO-1, 2 or 3.
        global_step: The step that the run goes on from.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    optimizer: Any = engine.optimizer
    is_stage_3 = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    if is_stage_3:
        optimizer.checkpoint_event_prologue()
    optimizer.load_state_dict(state_dict_list=None, checkpoint_folder=str(folder))
    if is_stage_3:
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()
    step = _step(folder)
    inner = optimizer.optimizer
    for parameter, state in inner.state.items():
        # torch's Adam counts in a tensor, DeepSpeed's own in whole numbers.
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            state["step"] = _step_beside(parameter, step, inner.defaults)
        else:
            state["step"] = int(step)
    for group in inner.param_groups:
        if "step" in group:
            group["step"] = int(step)
    engine.global_steps = global_step
    engine.global_samples = global_step * engine.train_batch_size()


def for_deepspeed(folder: Path, groups: int) -> None:
    """Writes the file of common settings that DeepSpeed's loaders ask for, without any that they'd apply.

    The loader of ZeRO-3 (DeepSpeed 0.19.8) gives the settings of the first parameter group to all of them, so
    that biases get weight decay; here each group keeps those that the run made it with.

    Args:
        folder: What `write_universal` wrote.
        groups: Number of parameter groups of the optimizer.
    """
    import deepspeed

    empty: list[dict[str, Any]] = [{} for _ in range(groups)]
    content = {
        "ds_version": deepspeed.__version__,
        "param_groups": empty,
        "optimizer_state_dict": {"state": {0: {"step": _step(folder)}}, "param_groups": empty},
    }
    torch.save(content, folder / "zero" / _GLOBAL_FILE)


def _not_adam(checkpoint: Path) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint}: only the state of an Adam can go on under another preset or, sharded, on another "
        "number of processes; go on with the preset and processes it was made with"
    )
