"""Costs from where the job runs: read off a profile, or measured on the device at hand."""
