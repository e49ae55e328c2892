"""CP-SAT on windows of a large program."""
