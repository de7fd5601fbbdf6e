"""What is trained: a file or a folder a task, with encoding, model class, collator, loss items and scores.

Settings, a DataConfig and a ModelConfig come in; what `hf_dist.training.steps.spec.RecipeTask` lists goes
out. Recipes name a task, training sees it through that protocol and through `items` alone; tasks import
data, metrics and config, and share `base`, `pretrained`, `plain_text` and `language_scores`.
"""
