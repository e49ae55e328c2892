"""The problem as numpy arrays."""
