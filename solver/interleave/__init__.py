"""Orders that interleave the chains of a problem, and the best schedule around them."""
