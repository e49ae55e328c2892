"""A step of several micro-batches in a row: its graphs, and the choice of shared parts."""
