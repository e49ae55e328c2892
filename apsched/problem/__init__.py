"""The scheduling problem as integers: no torch, no networkx."""
