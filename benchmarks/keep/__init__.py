"""What keeping gathered parameters from forward to backward gains, by cluster and memory cap."""
