"""How good the solver is, and how fast."""
