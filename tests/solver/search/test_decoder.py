"""The compiled search side: prices, legality, programs and figures are those of the plain
definitions.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve, sample_curve
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.arrays.bucket_prices import curve_price, legal, members_of
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.jit import source_stamp
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.decoder import Decoder, evaluate_labels
from apsched.solver.search.grouping import canonical
from apsched.solver.search.launch_policy import Policy
from tests.helpers.problems.strategies import layered_problem, random_caps, random_problem

POLICIES = tuple(
    Policy(
        lead=lead,
        copy_out_early=early,
        in_stalls=stalls,
        one_ahead=ahead,
        prefetch=prefetch,
        wait_reductions_at_once=at_once,
    )
    for lead, early, stalls, ahead, prefetch, at_once in (
        (np.inf, True, False, False, True, False),
        (1.0, False, True, False, True, False),
        (0.5, True, False, True, True, False),
        (0.0, False, False, False, False, True),
    )
)


def random_labels(pricer: Pricer, rng: random.Random) -> np.ndarray:
    """Return a random legal partition: pairs are put together as long as that stays legal."""
    size = len(pricer.arrays.kind)
    labels = np.arange(size)
    for _ in range(2 * size):
        merged = canonical(
            np.where(labels == labels[rng.randrange(size)], labels[rng.randrange(size)], labels)
        )
        if legal(pricer.tables, *members_of(merged)[1:], 2**60, 2**60):
            labels = merged
    return labels


@given(st.integers(1, 2**42), st.integers(1, 2**40), st.integers(0, 2**36), st.integers(0, 2**43))
@settings(max_examples=300, derandomize=True)
def test_a_price_is_that_of_the_curve_in_64_bits(
    first: int, more: int, rise: int, size: int
) -> None:
    curve = PriceCurve(
        size_bytes=(0, first, first + more), price_ticks=(3, 3 + rise // 2, 3 + rise)
    )
    assert price(curve, size) == curve(size)


def test_a_sampled_price_is_that_of_the_curve() -> None:
    curve = sample_curve(lambda size: 12.5 + size / 4.4e4 + (size > 2**20) * 7.0)
    rng = random.Random(0)
    for _ in range(500):
        size = int(2 ** rng.uniform(0, 42))
        assert price(curve, size) == curve(size)


def price(curve: PriceCurve, size: int) -> int:
    """Return the compiled price of ``size`` on ``curve``."""
    begins = np.array([0, len(curve.size_bytes)])
    return curve_price(begins, np.array(curve.size_bytes), np.array(curve.price_ticks), 0, size)


@pytest.mark.parametrize("seed", range(60))
def test_what_a_policy_makes_is_legal_and_costs_what_simulate_says(seed: int) -> None:
    rng = random.Random(seed)
    problem = (
        layered_problem(rng, num_layers=3)
        if seed % 3 == 0
        else random_problem(rng, max_collectives=8, max_compute=7)
    )
    pricer = Pricer(Instance(problem=problem, arrays=(small := problem_arrays(problem))))
    caps = random_caps(rng, problem)
    steer = caps.memory_cap_bytes
    decoder = Decoder(
        pricer, Caps(max_prefetch=caps.max_prefetch, in_flight_cap_bytes=caps.in_flight_cap_bytes)
    )
    labels = random_labels(pricer, rng)
    for policy in POLICIES:
        figures = decoder.figures(labels, policy, steer)
        program = decoder.program(labels, policy, steer)
        assert figures in (None, evaluate(small, program))
        schedule = expand(Instance(problem=problem, arrays=small), program)
        assert (figures is None) == bool(
            verify(problem, schedule, Caps(max_prefetch=caps.max_prefetch))
        )
        if figures is None:
            continue
        timeline = simulate(problem, schedule)
        assert figures.step_time_ticks == timeline.step_time_ticks
        assert figures.peak_memory_bytes == timeline.peak_memory_bytes
        assert figures.peak_in_flight_bytes == timeline.peak_in_flight_bytes
        assert figures.num_launches == timeline.num_launches == len(set(labels.tolist()))
    assert decoder.evaluations == len(POLICIES)


@pytest.mark.parametrize("seed", range(30))
def test_a_partition_is_legal_where_every_pair_and_the_caps_allow_it(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=8, max_compute=6)
    pricer = Pricer(Instance(problem=problem, arrays=(small := problem_arrays(problem))))
    caps = replace(random_caps(rng, problem), max_prefetch=None)
    bytes_cap, span_cap = (
        2**60 if cap is None else cap for cap in (caps.bucket_cap_bytes, caps.max_topo_span)
    )
    for _ in range(20):
        labels = canonical(np.array([rng.randrange(len(small.kind)) for _ in small.kind]))
        partition = pricer.partition_of(labels)
        expected = all(
            pricer.allowed(members, caps)
            and len({int(pricer.tables.depth[c]) for c in members}) == 1
            for members in partition.buckets
        )
        assert legal(pricer.tables, *members_of(labels)[1:], bytes_cap, span_cap) == expected
        assert (Decoder(pricer, caps).figures(labels, POLICIES[0], None) is not None) == expected


def test_compiled_code_in_the_cache_is_stale_when_what_it_calls_changes() -> None:
    """numba itself looks at the file of a function, not at those of the functions that it calls."""
    assert evaluate_labels._cache._cache_file._source_stamp == source_stamp()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [7, 12, 33, 56, 59, 64, 70, 76, 80, 87, 92])
def test_a_gradient_that_fits_is_held_until_its_reduction_is_done(seed: int) -> None:
    """Under a cap of what the same order took without one, nothing needs to be waited for sooner:
    each byte is counted once.
    """
    problem = layered_problem(random.Random(seed), num_layers=4, backward=True)
    decoder = Decoder(
        Pricer(Instance(problem=problem, arrays=(small := problem_arrays(problem)))), Caps()
    )
    at_need = Policy(lead=0.0, copy_out_early=True, prefetch=False)
    free = decoder.figures(labels := np.arange(len(small.kind)), at_need, None)
    assert free is not None
    tight = decoder.figures(labels, at_need, free.peak_memory_bytes)
    assert tight is not None
    assert tight.step_time_ticks == free.step_time_ticks
    assert tight.peak_memory_bytes <= free.peak_memory_bytes
