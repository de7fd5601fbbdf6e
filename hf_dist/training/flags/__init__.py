"""Flags and YAML -> RunConfig, and the flags of other scripts that mean the same.

Words of a command line, a YAML file and a recipe's defaults come in; a RunConfig goes out, or one error with
all that is wrong. `parsing` reads, `rules` settles what excludes or follows, `stock` translates; the run and
recipes import `parsing`.
"""
