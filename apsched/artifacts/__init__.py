"""Files that commands write and read back."""
