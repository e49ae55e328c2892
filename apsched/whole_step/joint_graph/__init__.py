"""Kept parameters where forward and backward are one graph."""
