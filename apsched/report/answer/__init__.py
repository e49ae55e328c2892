"""The first output of ``solve``: the step against the best baseline, its memory, suggestions."""
