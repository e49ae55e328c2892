"""Solve again with one input changed."""
