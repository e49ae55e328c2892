"""Measurements that one command repeats: ``python -m benchmarks.solver``. Not part of the wheel."""
