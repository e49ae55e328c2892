"""Flat and coalesced buckets on gloo."""
