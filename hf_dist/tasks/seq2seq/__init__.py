"""A text for a text, by an encoder-decoder that generates it.

Raw splits come in; `encoding` makes source and target tokens and `base` has what such tasks share. Each task
is a file: `summarization`, `translation`; recipes import those.
"""
