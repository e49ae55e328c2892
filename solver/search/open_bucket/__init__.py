"""Partitions in which one bucket at a time is open in each key, by dynamic programming."""
