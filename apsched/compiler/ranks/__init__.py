"""One answer for all process ranks of a job: who solves, how the others get it, the cache, and the
check before the first collective.
"""
