"""The share of scheduling in the time of compilation."""
