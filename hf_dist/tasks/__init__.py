"""One module a task: encoding, model class, collator, what the loss sums over, and scores."""
