"""Schedules run for real."""
