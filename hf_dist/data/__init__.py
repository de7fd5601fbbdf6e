"""Where rows come from and how they become tensors: hub, local files, built-in data, collation."""
