"""Prices of compute nodes."""
