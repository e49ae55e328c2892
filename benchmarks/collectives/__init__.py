"""The model of collectives beside published measurements."""
