"""Common parts of the benchmarks: cases, their processes, records and tables."""
