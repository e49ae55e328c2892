"""Other compute orders."""
