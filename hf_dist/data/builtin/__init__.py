"""Data and small models that need no download, from the documentation of the Python that runs.

Nothing but the standard library comes in; splits, trained tokenizers and small model configs go out, cached
once a machine. Each task imports its own part.
"""
