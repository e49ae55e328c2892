"""Costs from a job: read from a profile, or measured on this device."""
