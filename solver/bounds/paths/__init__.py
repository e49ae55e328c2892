"""The bound that prices buckets along paths."""
