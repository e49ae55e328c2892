"""What one more of something buys: never less than nothing, proven only by bounds, and exactly what
was changed.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from apsched.config import Caps, SolveOptions
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.network.alpha_beta import collective_us, group_shape
from apsched.costs.price_curve import PriceCurve, sample_curve
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
from apsched.problem.faster_network import faster_network
from apsched.problem.problem import Problem
from apsched.schedule.analysis.usage import chosen
from apsched.schedule.simulate import simulate
from apsched.solver import solve, solve_requested
from apsched.what_if.one_more import Relaxed, block_nodes, relaxed
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import random_caps, random_problem

STRICT = SolveOptions(time_slack=0.0)


def by_name(problem: Problem, caps: Caps) -> dict[str, Relaxed]:
    answer = solve(problem, caps, STRICT)
    return {
        more.name: more
        for more in relaxed(
            problem,
            caps,
            STRICT,
            answer,
            faster_network(problem, load_cluster("h100"), {"dp": (0, 8)}),
        )
    }


@pytest.mark.parametrize("seed", range(15))
def test_gains_lie_between_their_bounds(seed: int) -> None:
    """Proven <= gained <= possible; where the whole problem is solved, they are one."""
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=4, max_compute=4)
    caps = random_caps(rng, problem)
    answer = solve(problem, caps, STRICT)
    if answer.best is None:
        return
    for more in relaxed(
        problem, caps, STRICT, answer, faster_network(problem, load_cluster("h100"), {}, 400.0)
    ):
        assert (
            0 <= more.proven_ticks <= more.gain_ticks <= more.possible_ticks
            or more.verdict == "not solved"
        )
        if more.step_time_ticks is not None and answer.status == "optimal":
            assert (
                more.gain_ticks
                == more.proven_ticks
                == answer.best.step_time_ticks - more.step_time_ticks
            )
            assert more.verdict == ("gains" if more.gain_ticks else "gains nothing")


def two_gathers(price: PriceCurve) -> Problem:
    """Two nodes of 100 ticks with a gather each, of 1 GiB, that share no launch."""
    b = ByHand(prices={"all_gather": price})
    x = b.input("x", 512)
    for i in range(2):
        shard = b.input(f"s{i}", 512, kept=True)
        x = b.compute(
            f"c{i}",
            100,
            x,
            b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 512, 2**30, bucketable=False)),
            size=512,
        )
    return b.output(x)


def test_memory_that_binds() -> None:
    """Room for one gather: the second waits for the first node. With a GiB more it does not."""
    problem = two_gathers(line(60))
    more = by_name(problem, Caps(memory_cap_bytes=2**30 + 10_000))["memory"]
    assert (more.gain_ticks, more.verdict) == (60, "gains")
    assert more.change == "memory cap 1.00 GiB -> 2.00 GiB"
    more = by_name(problem, Caps(memory_cap_bytes=2**31 + 10_000))["memory"]
    assert (more.gain_ticks, more.verdict) == (0, "gains nothing")


def test_prefetch_that_binds() -> None:
    problem = two_gathers(line(60))
    found = by_name(problem, Caps(max_prefetch=0))["prefetch"]
    assert (found.gain_ticks, found.verdict) == (60, "gains")
    assert found.change == "prefetch cap 0 -> 2 compute nodes (a layer has 2)"
    assert (
        by_name(problem, Caps(max_prefetch=2))["prefetch"].verdict == "gains nothing"
    )  # a longer one is looked for, though none is used
    assert by_name(problem, Caps())["prefetch"].change == "no prefetch cap is set, so none binds"
    assert by_name(problem, Caps(max_prefetch=50))["prefetch"].change == (
        "the cap of 50 compute nodes does not bind: the graph has 2"
    )


def test_the_nodes_of_a_layer() -> None:
    """Those of the most common block."""
    problem = random_problem(random.Random(3), max_collectives=4, max_compute=4)
    modules = [""] * problem.num_nodes
    for node, module in zip(
        problem.compute_order, ("embed", "layers.0.a", "layers.0.b", "layers.1.a"), strict=False
    ):
        modules[node] = module
    assert block_nodes(replace(problem, modules=tuple(modules))) in (1, 2)
    assert block_nodes(replace(problem, modules=("",) * problem.num_nodes)) == len(
        problem.compute_order
    )


def test_formula_prices_are_priced_anew() -> None:
    """Two process ranks on two nodes: one NIC each; the curve is that of the cluster with 1 Gb/s
    more.
    """
    cluster = load_cluster("h100")
    shape = group_shape(cluster, (0, 8))
    problem = two_gathers(
        sample_curve(lambda size: collective_us(cluster, "all_gather", shape, size))
    )
    found = faster_network(problem, cluster, {"dp": (0, 8)})
    assert (found.gbit_per_s_after - found.gbit_per_s_before, found.priced_anew, found.scaled) == (
        1.0,
        ("dp",),
        (),
    )
    before, after = problem.keys[0].price, found.problem.keys[0].price
    assert after(2**30) < before(2**30)
    assert after(0) == before(0)
    assert by_name(problem, Caps())["network"].verdict == "gains"


def test_other_prices_are_scaled() -> None:
    """Latency stays, what a byte costs shrinks as the bandwidth grows; groups within a node
    stay.
    """
    problem = two_gathers(PriceCurve(size_bytes=(0, 1024), price_ticks=(1000, 1401)))
    found = faster_network(problem, load_cluster("h100"), {"dp": (0, 8)})
    assert found.problem.keys[0].price.price_ticks == (1000, 1400)
    assert (found.scaled, found.priced_anew) == (("dp",), ())
    inside = faster_network(problem, load_cluster("h100"), {"dp": (0, 1)})
    assert inside.problem == problem
    assert (inside.scaled, inside.priced_anew, inside.unchanged) == ((), (), ())


def test_a_short_distance_proves_nothing(debug_graphs: dict[str, Path]) -> None:
    """The answer under the cap has one that is shorter than a third of it, and a layer more is
    faster: buckets that pay begin further ahead. It was called a cap that does not bind.
    """
    problem = build_problem(load_graph(debug_graphs["forward"]))
    caps, options = Caps(max_prefetch=50), SolveOptions(budget=0)
    answer = solve_requested(problem, caps, options)
    assert answer.best is not None
    schedule = answer.best.schedule
    assert chosen(problem, schedule, simulate(problem, schedule)).prefetch < 50 // 3
    (*_, prefetch) = relaxed(problem, caps, options, answer, None)
    assert prefetch.step_time_ticks is not None
    assert prefetch.gain_ticks > 0
