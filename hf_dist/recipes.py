"""What a recipe is made of, by names that stay: for those in `recipes/` and for those of other packages.

One from outside is a file like ours: a docstring with its command line, a `Task`, `DEFAULTS`, `build` and
`main` (docs/own_recipes.md). Nothing is registered: a recipe imports what it needs from here and hands over
its task as an argument; a file format of its own is known within `with file_formats(...)`. A package makes a
recipe known to `hf-dist verify` by an entry point of the group `hf_dist.recipes`.

Importing this module imports torch and transformers, as any recipe does.
"""

from __future__ import annotations

from hf_dist.config import DataConfig, ModelConfig, RunConfig, at_least, option
from hf_dist.data.loading.sources import find_column, first_rows, hold_out, load_splits
from hf_dist.data.readers.files import file_formats
from hf_dist.data.readers.formats import ColumnFormat, Row, TextFormat
from hf_dist.data.readers.text import open_text
from hf_dist.data.tokenizing import encode_rows, tokenise
from hf_dist.errors import ConfigError, DataError, EngineError, HfDistError
from hf_dist.tasks.base import Task, refuse_empty
from hf_dist.tasks.items import ExampleItems, Items, SpanItems, TokenItems
from hf_dist.training.flags.parsing import make_config
from hf_dist.training.run.finished import FinishedRun
from hf_dist.training.run.recipe import Recipe
from hf_dist.training.run.runner import assemble, run_recipe
from hf_dist.training.steps.spec import RecipeTask

__all__ = [
    "ColumnFormat",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EngineError",
    "ExampleItems",
    "FinishedRun",
    "HfDistError",
    "Items",
    "ModelConfig",
    "Recipe",
    "RecipeTask",
    "Row",
    "RunConfig",
    "SpanItems",
    "Task",
    "TextFormat",
    "TokenItems",
    "assemble",
    "at_least",
    "encode_rows",
    "file_formats",
    "find_column",
    "first_rows",
    "hold_out",
    "load_splits",
    "make_config",
    "open_text",
    "option",
    "refuse_empty",
    "run_recipe",
    "tokenise",
]
