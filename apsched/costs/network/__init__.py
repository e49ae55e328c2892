"""Prices of collectives."""
