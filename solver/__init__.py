"""Problem -> schedule. Knows no torch."""

from apsched.solver.solve import least_memory, solve

__all__ = ["least_memory", "solve"]
