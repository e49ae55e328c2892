"""Lower bounds with proofs."""
