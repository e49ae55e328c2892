"""A schedule, its execution, its memory and its check."""
