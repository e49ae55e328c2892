"""What benchmarks share: cases, their processes, records and tables."""
