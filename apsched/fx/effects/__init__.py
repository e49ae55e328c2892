"""What a node writes, shares and draws, or that it is a barrier."""
