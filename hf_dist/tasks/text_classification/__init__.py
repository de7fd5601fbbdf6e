"""A class, several classes or a number for a text or a pair of texts.

Raw splits come in: `columns` finds texts and labels, `targets` says what a label is and how it is scored.
`task` puts them together; recipes import it.
"""
