"""What is trained: a file or a folder a task, with encoding, model class, collator, loss items and scores.

Settings, a DataConfig and a ModelConfig come in; what `hf_dist.training.steps.spec.RecipeTask` lists goes
out. Recipes name a task, training sees it through that protocol and through `items` alone; tasks import
data, metrics and config, and share `base`, `pretrained`, `plain_text` and `language_scores`.
"""

import gc

# Every recipe comes through this door first. The modules of these libraries are a million objects that stay;
# looking for garbage among them, over and over, would be a tenth of a recipe's start.
_collecting = gc.isenabled()
gc.disable()
try:
    import datasets  # noqa: F401
    import transformers.trainer  # noqa: F401
finally:
    if _collecting:
        gc.enable()
