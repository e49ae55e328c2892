"""Random FX graphs, captured, scheduled, written back and run on two gloo processes; ``run.py``
does it for as long as you like.
"""

import pytest

from tests.fuzz.run import try_seeds

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("first_seed", "num_seeds", "solve_every"),
    [(0, 150, 10**9), (10**6, 12, 1)],
    ids=["random orders", "solved"],
)
def test_random_graphs_do_what_they_did(tmp_path, first_seed, num_seeds, solve_every):
    found = try_seeds(
        first_seed=first_seed,
        num_seeds=num_seeds,
        solve_every=solve_every,
        seconds=700,
        folder=tmp_path,
    )
    assert found["failures"] == [], (
        found["failures"][0]["failure"] + "\n" + found["failures"][0]["program"]
    )
    assert found["tried"] == num_seeds
