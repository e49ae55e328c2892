"""Heuristics around one compute order."""
