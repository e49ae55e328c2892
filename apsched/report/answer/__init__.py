"""What ``solve`` prints first: the step against the best baseline, its memory, what to try next."""
