"""Where rows come from and how they become tensors.

What the data flags name comes in; raw splits, token ids and padded batches go out (in order: `readers`,
`loading` or `builtin`, `tokenizing`, `collate` or `packing`; `cache` keeps what is made once a machine,
`device` copies to and from a GPU). It imports config, errors and batching; tasks and training import it.
"""
