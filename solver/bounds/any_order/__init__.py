"""Bounds valid for every compute order."""
