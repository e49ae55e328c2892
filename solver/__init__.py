"""Problem -> schedule. Knows no torch."""
