"""Scores: `evaluate.Metric` modules that load by path, without a network."""
