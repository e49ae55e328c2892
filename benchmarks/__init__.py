"""What is measured, and repeated by one command: ``python -m benchmarks.solver``. Not part of the
wheel.
"""
