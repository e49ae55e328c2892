"""Whether the tests notice small faults: ``python -m tests.mutation``."""
