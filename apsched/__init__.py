"""apsched: the fastest communication schedule that fits the memory, with a proof of how far it can be from the best."""

__version__ = "0.1.0"
