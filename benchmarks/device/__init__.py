"""Memory and times of a GPU beside their predictions."""
