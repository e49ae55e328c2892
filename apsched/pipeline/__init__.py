"""SOURCE -> checked answer."""
