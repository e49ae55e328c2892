"""Measured costs from a profiler trace."""
