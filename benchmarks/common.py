"""What the benchmarks share: arguments, tables, the machine's description, and claims that can fail.

    python benchmarks/X.py [--quick] [--json FILE]

A benchmark fills a `Results` and hands it to `main`, which prints it and exits with 1 if a claim fails:

    def run(results: Results, options: argparse.Namespace) -> None:
        results.table("speed", ["case", "tokens/s"], [["a", 1.0]])
        results.at_least("a is fast", 1.0, 0.5)

    if __name__ == "__main__":
        main(run, __doc__)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure and the bound it is held to."""

    name: str
    measured: float
    bound: float
    at_least: bool

    @property
    def ok(self) -> bool:
        """False also for a NaN."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


@dataclass(kw_only=True)
class Results:
    """Tables and claims of one run. They are printed as they come."""

    console: Console = field(default_factory=lambda: Console(width=None if sys.stdout.isatty() else 160))
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints a table and keeps it for the JSON file. Floats are shown with four significant digits."""
        self.tables[title] = {"columns": list(columns), "rows": [list(row) for row in rows]}
        table = Table(title=title, title_justify="left", highlight=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(_shown(value) for value in row))
        self.console.print(table)

    def at_most(self, name: str, measured: float, bound: float) -> None:
        """Claims that a figure is at most so much."""
        self.claims.append(Claim(name=name, measured=float(measured), bound=bound, at_least=False))

    def at_least(self, name: str, measured: float, bound: float) -> None:
        """Claims that a figure is at least so much."""
        self.claims.append(Claim(name=name, measured=float(measured), bound=bound, at_least=True))

    def holds(self, name: str, truth: bool) -> None:
        """Claims that something is so."""
        self.at_least(name, float(truth), 1.0)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    accelerator = "none"
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            accelerator = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "accelerator": accelerator,
        "load": f"{os.getloadavg()[0]:.2f} over the last minute when done",
        "software": f"Python {platform.python_version()}, " + ", ".join(versions),
    }


def main(
    run: Callable[[Results, argparse.Namespace], None],
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Runs a benchmark from the command line; exits with 1 if a claim fails.

    Args:
        run: measures, and fills the results.
        description: the script's docstring.
        add_arguments: adds flags beside `--quick` and `--json`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short run with fewer cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    if add_arguments is not None:
        add_arguments(parser)
    options = parser.parse_args()
    results = Results()
    started = time.perf_counter()
    run(results, options)
    seconds = time.perf_counter() - started
    rows = [
        [
            claim.name,
            claim.measured,
            (">= " if claim.at_least else "<= ") + f"{claim.bound:g}",
            _verdict(claim),
        ]
        for claim in results.claims
    ]
    results.table("claims", ["claim", "measured", "bound", ""], rows)
    described = machine()
    for name, value in described.items():
        results.console.print(f"{name}: {value}", highlight=False, soft_wrap=True)
    results.console.print(f"took {seconds:.0f} s", highlight=False)
    if options.json is not None:
        claims = [{**asdict(claim), "ok": claim.ok} for claim in results.claims]
        content = {"machine": described, "seconds": seconds, "tables": results.tables, "claims": claims}
        options.json.write_text(json.dumps(content, indent=1, default=str) + "\n")
    sys.exit(0 if all(claim.ok for claim in results.claims) else 1)


def _verdict(claim: Claim) -> str:
    return "ok" if claim.ok else "FAILS"
