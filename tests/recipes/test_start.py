"""What a recipe loads before it has work for it."""

import json
import subprocess
import sys
from pathlib import Path

# Needed by scores, by one engine, by trackers: none of them before it is asked for.
LATE = ["evaluate", "sklearn", "scipy.stats", "requests", "seqeval", "sacrebleu", "rouge_score", "deepspeed",
        "wandb", "tensorboard", "matplotlib"]  # fmt: skip


def test_a_recipe_starts_without_what_only_evaluation_or_one_engine_needs():
    recipes = sorted(
        f"recipes.{file.stem}" for file in Path("recipes").glob("*.py") if file.stem != "__init__"
    )
    assert len(recipes) == 7
    code = f"import gc, json, sys, {', '.join(recipes)}\n"
    code += (
        f"print(json.dumps([[n for n in {LATE} if n in sys.modules], gc.isenabled(), gc.get_freeze_count()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, collecting, frozen = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []
    # Importing leaves the garbage collector as it was; only the `main` of a recipe freezes what is there.
    assert collecting
    assert frozen == 0
