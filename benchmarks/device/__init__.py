"""A GPU beside what was predicted of it."""
