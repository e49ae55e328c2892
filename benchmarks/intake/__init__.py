"""Which graphs of other people's programs apsched takes, beside those that torch's own scheduler
takes: ``python -m benchmarks.intake``.
"""
