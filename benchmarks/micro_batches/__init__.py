"""Several micro-batches as one step, beside one at a time."""
