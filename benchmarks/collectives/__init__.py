"""The model of collectives and published measurements."""
