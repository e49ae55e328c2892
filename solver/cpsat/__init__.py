"""The exact CP-SAT model."""
