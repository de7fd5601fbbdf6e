"""Settings that exclude each other, and settings that follow from others.

A flag that a user gives decides: what the recipe would do by default gives way, with a line in the log, and
two of the user's flags that contradict each other are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings of when something is done, and of after how many steps.
_PACES = (
    ("eval_strategy", "eval_steps"),
    ("save_strategy", "save_steps"),
    ("logging_strategy", "logging_steps"),
)

# Flags that do nothing unless another one asks for what they change.
_NEEDS = {
    "metric_for_best_model": "load_best_model_at_end",
    "greater_is_better": "load_best_model_at_end",
    "early_stopping_threshold": "early_stopping_patience",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    "hub_model_id": "push_to_hub",
}

# Named because a stock script trains otherwise by default: what decides the weights, and the stock value.
_STOCK_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "adam_epsilon": 1e-8,
}

# TrainingArguments' own default (transformers 5.24).
_SAVE_STEPS = 500

# What rows may be padded to a multiple of in half precision (see --pad_to_multiple_of).
_MULTIPLE = 8


def conflicts(named: Mapping[str, Any]) -> list[str]:
    """Settings named by the user that exclude each other, one line each."""
    return [*_batching(named), *_paces(named), *_durations(named), *_others(named)]


def _batching(named: Mapping[str, Any]) -> list[str]:
    found = []
    batching = named.get("batching", "tokens" if "tokens_per_step" in named else None)
    if batching == "tokens":
        for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
            if name in named:
                found.append(
                    f"--{name} conflicts with --batching tokens, which derives it from --tokens_per_step; "
                    "drop it, or say --batching examples (without --tokens_per_step)"
                )
    elif batching == "examples" and "tokens_per_step" in named:
        found.append(
            "--tokens_per_step conflicts with --batching examples, where a step holds "
            "per_device_train_batch_size x gradient_accumulation_steps x ranks examples; drop it"
        )
    if named.get("streaming") and _by_rows(named):
        found.append(
            "--streaming conflicts with --per_device_train_batch_size and --gradient_accumulation_steps: a "
            "stream is batched by tokens; say --max_tokens_per_device and --tokens_per_step instead"
        )
    if named.get("loss_normalization") == "mean" and (batching == "examples" or _by_rows(named)):
        found.append(
            "--loss_normalization mean conflicts with --batching examples, whose steps hold the same "
            "number of examples; drop one of them"
        )
    return found


def _paces(named: Mapping[str, Any]) -> list[str]:
    found = []
    for strategy, steps in _PACES:
        if strategy in named and steps in named and _word(named[strategy]) != "steps":
            found.append(
                f"--{strategy} {_word(named[strategy])} conflicts with --{steps} "
                f"{_number(named[steps])}, which is for --{strategy} steps; drop one of them"
            )
    if "eval_delay" in named and _word(named.get("eval_strategy")) == "no":
        found.append(
            f"--eval_delay {named['eval_delay']} conflicts with --eval_strategy no; drop one of them"
        )
    best = _why_best(named)
    if best is None:
        return found
    evaluates, saves = (
        _paced(named, "eval_strategy", "eval_steps"),
        _paced(named, "save_strategy", "save_steps"),
    )
    for strategy, pace in (("eval_strategy", evaluates), ("save_strategy", saves)):
        if pace == "no":
            found.append(f"{best} conflicts with --{strategy} no; drop one of them")
    if "no" in (evaluates, saves) or saves == "best" or None in (evaluates, saves):
        return found
    if evaluates != saves:
        found.append(
            f"{best} needs a checkpoint of each evaluation that may be the best, and evaluation goes by "
            f"{evaluates}, saving by {saves}; give both the same strategy"
        )
    elif (
        "eval_steps" in named
        and "save_steps" in named
        and not _fits(named["save_steps"], named["eval_steps"])
    ):
        found.append(
            f"{best} needs --save_steps to be a multiple of --eval_steps; they are "
            f"{_number(named['save_steps'])} and {_number(named['eval_steps'])}"
        )
    return found


def _durations(named: Mapping[str, Any]) -> list[str]:
    if named.get("max_steps", -1) > 0 and "num_train_epochs" in named:
        return [
            f"--max_steps {named['max_steps']} conflicts with --num_train_epochs "
            f"{_number(named['num_train_epochs'])}; give one of them"
        ]
    return []


def _others(named: Mapping[str, Any]) -> list[str]:
    found = []
    if named.get("fp16") and named.get("bf16"):
        found.append("--fp16 and --bf16 exclude each other; drop one of them")
    if named.get("overwrite_output_dir") and named.get("resume", "never") != "never":
        found.append(
            f"--overwrite_output_dir conflicts with --resume {named['resume']}: one starts afresh, the other "
            "goes on; drop one of them"
        )
    return found


def settle(
    named: Mapping[str, Any], defaults: Mapping[str, Any], *, from_stock: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The whole settings, and a line for each that follows from another one.

    Args:
        named: What the user named, without conflicts.
        defaults: The recipe's own defaults.
        from_stock: Whether the user named something by a stock flag.
    """
    values = {**defaults, **named}
    notes: list[str] = []
    for name, needed in _NEEDS.items():
        if name in named and not values.get(needed) and not _chooses_best(name, values):
            notes.append(f"--{name} has no effect without --{needed}")
    if values.get("overwrite_output_dir") and "output_dir" not in values:
        notes.append("--overwrite_output_dir has no effect without --output_dir: each run gets a folder")
    _settle_rate(named, values, notes)
    _settle_paces(named, values, notes)
    if by_rows := _by_rows(named):
        _settle_rows(named, values, notes)
    if from_stock or by_rows:
        _name_defaults(named, values, notes)
    return values, notes


def _settle_rate(named: Mapping[str, Any], values: dict[str, Any], notes: list[str]) -> None:
    """A recipe's own learning rate suits a small model drawn anew; a trained one takes the usual rate."""
    trains = named.get("do_train") or not (named.get("do_eval") or named.get("do_predict"))
    adapts = values.get("peft", "none") != "none" or values.get("adapter_name_or_path") is not None
    if not trains or adapts or named.get("model_name_or_path") is None or "learning_rate" in named:
        return
    usual, own = _STOCK_DEFAULTS["learning_rate"], values.get("learning_rate")
    if own is not None and own != usual:
        values["learning_rate"] = usual
        notes.append(
            f"--learning_rate {usual}, the usual one for a trained model; this recipe's own ({own}) suits a "
            "small one drawn anew"
        )


def _settle_paces(named: Mapping[str, Any], values: dict[str, Any], notes: list[str]) -> None:
    for strategy, counted in _PACES:
        if counted in named:
            values[strategy] = "steps"
    if "early_stopping_patience" in named:
        # It compares with the best evaluation so far, which must be kept to be returned to.
        values.setdefault("load_best_model_at_end", True)
    if not values.get("load_best_model_at_end"):
        return
    evaluates, saves = (
        _paced(named, "eval_strategy", "eval_steps"),
        _paced(named, "save_strategy", "save_steps"),
    )
    if saves == "best":
        return
    followed: tuple[str, str] | None = None
    if evaluates is not None and (saves is None or "save_steps" not in named):
        followed = ("save", "eval")
    elif (saves is not None and evaluates is None) or (
        evaluates == saves == "steps" and "eval_steps" not in named
    ):
        followed = ("eval", "save")
    if followed is None:
        return
    follower, leader = followed
    before = dict(values)
    values[f"{follower}_strategy"] = _word(values[f"{leader}_strategy"])
    steps = values.get("save_steps", _SAVE_STEPS) if leader == "save" else _saves_of_evaluations(values)
    if values[f"{follower}_strategy"] == "steps" and steps is not None:
        values[f"{follower}_steps"] = steps
    if values != before:
        pace = values[f"{follower}_strategy"]
        number = f" --{follower}_steps {_number(values[f'{follower}_steps'])}" if pace == "steps" else ""
        notes.append(
            f"--load_best_model_at_end: --{follower}_strategy {pace}{number}, as --{leader}_strategy says"
        )


def _saves_of_evaluations(values: Mapping[str, Any]) -> float | None:
    """A number of steps between saves that fall on evaluations; those come with the log by default."""
    if "eval_steps" in values:
        return values["eval_steps"]
    logs = values.get("logging_steps")
    return logs if logs is None or logs < 1 else -(-_SAVE_STEPS // logs) * logs


def _settle_rows(named: Mapping[str, Any], values: dict[str, Any], notes: list[str]) -> None:
    values["batching"] = "examples"
    rows = values.setdefault("per_device_train_batch_size", 8)
    passes = values.get("gradient_accumulation_steps", 1)
    said = f"a step holds {rows} x {passes} examples a rank (--batching examples)"
    if "max_tokens_per_device" not in named:
        longest = values.get("block_size") or values.get("max_length")
        if longest is not None:
            longest += values.get("max_target_length", 0)
            values["max_tokens_per_device"] = rows * -(-longest // _MULTIPLE) * _MULTIPLE
            said += (
                f", and --max_tokens_per_device {values['max_tokens_per_device']} lets {rows} of the longest "
            )
            said += "rows through at once"
    names = [n for n in ("per_device_train_batch_size", "gradient_accumulation_steps") if n in named]
    notes.append(" ".join(f"--{name} {named[name]}" for name in names) + f": {said}")


def _name_defaults(named: Mapping[str, Any], values: Mapping[str, Any], notes: list[str]) -> None:
    differ = [
        f"--{name} {values[name]} (stock {stock})"
        for name, stock in _STOCK_DEFAULTS.items()
        if name not in named
        and values.get(name, stock) != stock
        # Steps that are counted otherwise.
        and not (name == "num_train_epochs" and named.get("max_steps", -1) > 0)
    ]
    if differ:
        notes.append(f"not given, so this recipe's own: {', '.join(differ)}")


def _by_rows(named: Mapping[str, Any]) -> bool:
    """Whether the user counts rows, and says nothing of the kind of batching."""
    rows = "per_device_train_batch_size" in named or "gradient_accumulation_steps" in named
    return rows and "batching" not in named and "tokens_per_step" not in named


def _why_best(named: Mapping[str, Any]) -> str | None:
    """The flag for which the best model must be kept, if there is one."""
    if named.get("load_best_model_at_end"):
        return "--load_best_model_at_end"
    if "early_stopping_patience" in named and "load_best_model_at_end" not in named:
        return "--early_stopping_patience"
    return None


def _chooses_best(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a best checkpoint is chosen all the same, where `name` says by what."""
    if name not in ("metric_for_best_model", "greater_is_better"):
        return False
    return "early_stopping_patience" in values or _word(values.get("save_strategy")) == "best"


def _paced(named: Mapping[str, Any], strategy: str, steps: str) -> str | None:
    """The strategy that a user asks for, by name or by a number of steps."""
    return "steps" if steps in named else _word(named.get(strategy))


def _fits(save: float, evaluate: float) -> bool:
    """Whether each save falls on an evaluation; shares of the run are compared with shares only."""
    if (save < 1) != (evaluate < 1):
        return False
    ratio = save / evaluate
    return abs(ratio - round(ratio)) < 1e-6 and round(ratio) >= 1


def _word(value: Any) -> str | None:
    """The value of an enum of transformers, or the word itself."""
    return None if value is None else str(getattr(value, "value", value))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
