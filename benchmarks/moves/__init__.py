"""The gain from moving compute."""
