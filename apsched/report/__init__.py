"""Text, tables, pictures and traces of a result."""
