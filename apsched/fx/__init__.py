"""Reads and copies FX graphs, before anything is scheduled."""
