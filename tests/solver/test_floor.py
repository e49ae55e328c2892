"""The least peak is that of a schedule that keeps the other caps, too."""

import random

from strategies import random_problem

from apsched.config import Caps
from apsched.solver.compact import compact
from apsched.solver.expand import expand
from apsched.solver.floor import just_in_time
from apsched.verify import verify


def test_what_starts_just_in_time_keeps_the_other_caps() -> None:
    """A collective on the path, ready long before its need, waits for the cap on prefetch, too (it once did not)."""
    for seed in range(200):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=6, max_spine=12, chained=rng.choice((0.0, 0.3, 0.6)))
        small = compact(problem)
        most = max(c.output_bytes for c in problem.collectives)
        caps = Caps(max_prefetch=rng.choice((1, 2, 4)), in_flight_cap_bytes=rng.choice((None, most)), max_topo_span=rng.choice((None, 3)))
        floor = just_in_time(problem, small, caps)
        assert floor is not None, seed  # room for one in flight is room for one after the other
        assert verify(problem, expand(problem, small, floor.program), caps) == (), seed
