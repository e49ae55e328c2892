"""Moves and flips along repeated layers, by hand."""

from dataclasses import replace

import numpy as np

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.search.bucket_forms import flips
from apsched.solver.search.launch_policy import Policy
from apsched.solver.search.neighbourhood import JOIN, Neighbourhood
from tests.helpers.problems.layered import Layer, layered

NUM_LAYERS = 6
FLAT = Policy(lead=0.0, copy_out_early=True)


def test_a_join_in_a_layer_is_made_in_every_layer_and_one_across_layers_in_every_second() -> None:
    """Layers with two gathers each: the two of a layer; the second and the first of the next."""
    problem = layered([Layer()] * NUM_LAYERS)
    names = [problem.node_names[c.start] for c in problem.collectives]
    neighbourhood = Neighbourhood(Instance.of(problem).arrays)
    joins = {
        frozenset((names[a], names[b]) for a, b in zip(move.of, move.to, strict=True))
        for move in neighbourhood.periodic(np.arange(len(names)))
        if move.kind == JOIN
    }
    inside = {(f"ag{k}_0", f"ag{k}_1") for k in range(NUM_LAYERS)}
    across = {(f"ag{k}_1", f"ag{k + 1}_0") for k in range(NUM_LAYERS - 1)}
    assert inside in joins
    assert across in joins
    assert {pair for pair in inside if int(pair[0][2]) % 2 == 0} in joins


def test_forms_are_flipped_by_key_by_repeated_layer_and_one_by_one() -> None:
    """Four gathers in two buckets, all flat: a key can become coalesced as a whole; the first
    collectives of the buckets are alike, so both flip together; then each alone.
    """
    arrays = problem_arrays(layered([Layer(), Layer()]))
    arrays = replace(arrays, coalesces=np.ones(4, dtype=np.bool_))
    labels = np.array([0, 0, 2, 2])
    everything, first, second = [True] * 4, [True, True, False, False], [False, False, True, True]
    row = (0, 2)
    for alike, expected in (
        ({}, [everything, first, second]),
        ({0: (row, 0), 2: (row, 1)}, [everything, everything, first, second]),
        ({2: (row, 1)}, [everything, everything, first, second]),
    ):
        found = [mask.tolist() for mask in flips(arrays, labels, FLAT, alike)]
        assert [mask for mask in found if any(mask)] == expected
