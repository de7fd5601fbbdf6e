"""The command line `hf-dist`.

`hf-dist --help` must answer at once, so this module imports only what argparse needs; each subcommand
imports its own work when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_dist.errors import ConfigError, exit_on_error


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script.

    Args:
        argv: arguments without the program's name; default: those of the process.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.run is not _verify:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.flags = rest
    exit_on_error(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-dist", description="Fine-tune Hugging Face models exactly, from one CPU to many GPU nodes."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_presets(commands)
    _add_verify(commands)
    _add_merge(commands)
    return parser


def _add_presets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    presets = commands.add_parser("presets", help="list, show, write and check engine presets")
    presets.set_defaults(run=_list_presets)
    actions = presets.add_subparsers(title="actions", metavar="ACTION")

    show = actions.add_parser("show", help="print the DeepSpeed JSON of one preset")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--accelerate", action="store_true", help="print its accelerate config instead")
    show.set_defaults(run=_show_preset)

    write = actions.add_parser("write", help="write all presets as files")
    write.add_argument("directory", nargs="?", default="ds_configs", metavar="DIR")
    write.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    write.set_defaults(run=_write_presets)

    check = actions.add_parser("check", help="find what is wrong in a DeepSpeed JSON of your own")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.set_defaults(run=_check_files)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="train on several splits and engines and compare them number by number",
        usage="hf-dist verify RECIPE [--splits 1x1,1x4,2x2] [--presets none,zero2] [--tolerance 1e-4] "
        "[recipe flags]",
        description="Runs the same 30 steps, without dropout, on each split and each preset. Exits 1 where a "
        "loss, a gradient norm or the final weights differ by more than rounding. All other flags go to the "
        "recipe.",
        allow_abbrev=False,
    )
    verify.add_argument(
        "recipe",
        metavar="RECIPE",
        help="name of a recipe, here or of an installed package, or the path of its script",
    )
    verify.add_argument(
        "--splits", default="1x1,1x4,2x2", help="processes x forward passes of each in a step (%(default)s)"
    )
    verify.add_argument("--presets", default="none", help="engines, run on the widest split (%(default)s)")
    verify.add_argument(
        "--tolerance", type=float, default=1e-4, help="relative difference that is allowed (%(default)s)"
    )
    verify.set_defaults(run=_verify)


def _add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    merge = commands.add_parser(
        "merge",
        help="write an adapter and its base as one plain model",
        description="Merges the adapter into its base model, compares the logits of the two, and writes a "
        "model that loads without peft, with its tokenizer.",
    )
    merge.add_argument(
        "adapter", metavar="ADAPTER", help="output folder of a run with --peft, or a checkpoint"
    )
    merge.add_argument("out", metavar="OUT", help="folder to write; must not exist yet")
    merge.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default: the base's own"
    )
    merge.add_argument(
        "--trust_remote_code", action="store_true", help="run code that the base model's repository ships"
    )
    merge.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from hf_dist.merge import merge

    merged = merge(
        Path(arguments.adapter),
        Path(arguments.out),
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(
        f"{merged.folder}: {merged.base} with the adapter, {merged.bytes / 1e6:,.1f} MB in {merged.dtype}; "
        f"its logits differ from the adapter model's by {merged.difference:.1e} of the largest"
    )


def _verify(arguments: argparse.Namespace) -> None:
    from hf_dist.verify import verify

    agree = verify(
        arguments.recipe,
        splits=arguments.splits,
        presets=arguments.presets,
        flags=arguments.flags,
        tolerance=arguments.tolerance,
    )
    if not agree:
        sys.exit(1)


def _list_presets(_: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from hf_dist.presets.catalogue import PRESETS

    table = Table(show_lines=True)
    for column in ("preset", "ZeRO", "offload", "choose it when", "what it costs", "what it needs"):
        table.add_column(column, no_wrap=column == "preset")
    for preset in PRESETS.values():
        parts = [
            f"{part} to {device}"
            for part, device in (
                ("optimizer", preset.offload_optimizer),
                ("parameters", preset.offload_param),
            )
            if device != "none"
        ]
        stage = "-" if preset.zero_stage is None else str(preset.zero_stage)
        table.add_row(preset.name, stage, "\n".join(parts) or "-", preset.choose, preset.costs, preset.needs)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def _show_preset(arguments: argparse.Namespace) -> None:
    from hf_dist.presets.catalogue import accelerate_config, as_json, ds_config

    config = ds_config(arguments.name)
    if arguments.accelerate:
        sys.stdout.write(accelerate_config(arguments.name))
    elif config is None:
        raise ConfigError(
            f"preset {arguments.name!r} runs without DeepSpeed and has no JSON; "
            "its accelerate config: hf-dist presets show none --accelerate"
        )
    else:
        sys.stdout.write(as_json(config))


def _write_presets(arguments: argparse.Namespace) -> None:
    from hf_dist.presets.catalogue import drift, write_files

    if arguments.check:
        wrong = drift(arguments.directory)
        for name in wrong:
            print(f"{arguments.directory}/{name} is out of date")
        if wrong:
            print(f"mend: hf-dist presets write {arguments.directory}")
            sys.exit(1)
        return
    for name in write_files(arguments.directory):
        print(f"wrote {arguments.directory}/{name}")


def _check_files(arguments: argparse.Namespace) -> None:
    from hf_dist.presets.catalogue import load_json
    from hf_dist.presets.lint import lint

    failed = False
    for file in arguments.files:
        try:
            findings = lint(load_json(file), file=file)
        except ConfigError as error:
            print(f"{file}: error: {error}")
            failed = True
            continue
        for finding in findings:
            print(f"{file}: {'error' if finding.error else 'warning'}: {finding} [{finding.kind}]")
        if not findings:
            print(f"{file}: nothing wrong found")
        failed |= any(finding.error for finding in findings)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
