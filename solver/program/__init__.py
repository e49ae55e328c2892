"""An order of operations, and its exact figures."""
