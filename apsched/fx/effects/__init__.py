"""Writes, shared storages and draws of a node, or that it is a barrier."""
