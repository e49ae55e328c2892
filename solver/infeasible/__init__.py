"""Why no schedule fits."""
