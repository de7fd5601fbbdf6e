"""Counts, on a CPU, the calls for which the host would wait for a GPU.

Seen are: reading a tensor's value (`item`, `bool`, `int`, `float`, `tolist`, `numpy`, `cpu`, printing),
operations whose result has a size that depends on values (`nonzero`, selection by a mask, `unique`), and
tensors made on a device from Python numbers, which are copied from memory that isn't pinned.

Not seen is what only CUDA does: a `to` between devices (here there is one), synchronizing a stream or an
event, a kernel or an operator written in C++ that waits by itself, memory that is taken from the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

_TORCH = str(Path(torch.__file__).parent)

_READS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__repr__: "printing",
}
_FROM_PYTHON = (torch.tensor, torch.as_tensor)

_aten = torch.ops.aten
_SIZED_BY_VALUES = {
    _aten._local_scalar_dense.default: "item",
    _aten.equal.default: "equal",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten._unique2.default: "unique",
    _aten.unique_consecutive.default: "unique",
    _aten.bincount.default: "bincount",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
}


class Wait(NamedTuple):
    """A call that waits.

    Attributes:
        step: Optimizer steps that were done before.
        part: "forward" (the loss included), "backward", "log" or "step" (all else of a step).
        call: What was called.
        place: File, function and line that called it, torch's own files left out.
    """

    step: int
    part: str
    call: str
    place: str


class _Calls(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _READS:
            self._note(_READS[func])
        elif func is torch.Tensor.new_tensor:
            self._note("new_tensor")
        elif func in _FROM_PYTHON and named.get("device") is not None and _is_python(args[0]):
            self._note(f"{func.__name__}(device=)")
        elif func is torch.Tensor.to and "cpu" in args[1:] and not named.get("non_blocking"):
            self._note('to("cpu")')
        return func(*args, **named)


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SIZED_BY_VALUES:
            self._note(_SIZED_BY_VALUES[func])
        elif func is _aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            self._note("selection by a mask")
        return func(*args, **(kwargs or {}))


def _is_python(data: Any) -> bool:
    """Numbers to be copied (of an empty list nothing is, and a tensor may be on the device already)."""
    return not torch.is_tensor(data) and data != []


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class Waits(TrainerCallback):
    """Watches a training; the last of its callbacks, so that a step ends with it."""

    def __init__(self, trainer: Any) -> None:
        self.found: list[Wait] = []
        self._step = 0
        self._parts: list[str] = []
        trainer.add_callback(self)
        trainer.compute_loss = self._watched("forward", trainer.compute_loss)
        trainer.accelerator.backward = self._watched("backward", trainer.accelerator.backward)

    def _watched(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self._parts.append(part)
            result = call(*arguments, **named)
            self._parts.pop()
            return result

        return watched

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        with _Calls(self._note), _Operations(self._note):
            yield

    def of_step(self, step: int) -> list[Wait]:
        return [wait for wait in self.found if wait.step == step and wait.part != "log"]

    def _note(self, call: str) -> None:
        frames = list(_frames())
        names = {frame.f_code.co_name for frame in frames}
        files = [frame.f_code.co_filename for frame in frames]
        # Batches are collated from the host's tensors, and torch keeps its optimizers' step counts there.
        if "_run_epoch" not in names or any("torch/utils/data/" in f or "torch/optim/" in f for f in files):
            return
        part = self._parts[-1] if self._parts else "step"
        if "_maybe_log_save_evaluate" in names:
            part = "log"
        where = next(frame for frame in frames if not frame.f_code.co_filename.startswith(_TORCH))
        file = "/".join(Path(where.f_code.co_filename).parts[-3:])
        self.found.append(Wait(self._step, part, call, f"{file}:{where.f_lineno} {where.f_code.co_name}"))


def _frames() -> Iterator[FrameType]:
    """The callers of what was called, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back
