"""A tag for every word: entities in any scheme, or plain tags.

Raw splits come in: `rows` finds and checks words and tags, `encoding` turns them into tokens and labels.
`task` puts them together; recipes import it.
"""
