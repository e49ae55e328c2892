"""Eager FSDP2 in a running job: settings that are the same on all process ranks, and the choice of
kept units.
"""
