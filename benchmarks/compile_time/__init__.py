"""What scheduling adds to the time of compilation."""
