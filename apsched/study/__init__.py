"""Many questions at once: a grid of options, solved where it must be, kept in one file. Needs torch
only to capture.
"""
