"""Figures and explanations derived from a schedule."""
