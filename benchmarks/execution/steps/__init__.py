"""Whole steps that run for real in several ways: parameters kept, micro-batches interleaved."""
