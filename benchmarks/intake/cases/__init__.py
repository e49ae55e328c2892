"""What is surveyed, by where it comes from."""
