"""The second opinion: the same problem as a MILP, through PuLP."""
