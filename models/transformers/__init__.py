"""Models of Transformers, from a configuration alone: ``config`` for the families that have a form
of their own here, ``auto`` for the others.
"""
