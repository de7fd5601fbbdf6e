"""The span of a context that answers a question, or that there is none.

Raw splits come in: `rows` finds and checks questions and answers, `encoding` makes windows, `decode` finds
answers in logits. `task` puts them together; recipes import it, and saved models' cards `decode.answer`.
"""
