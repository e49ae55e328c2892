"""What moving compute gains."""
