"""Causal language models: plain text, prompts with answers, conversations.

Raw splits come in: `forms` finds what they hold, `encoding` turns each form into tokens and labels. `task`
puts them together; recipes import it.
"""
