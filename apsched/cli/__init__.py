"""The command line: parses, calls, prints; no logic (design: surfaces)."""

from apsched.cli.main import main

__all__ = ["main"]
