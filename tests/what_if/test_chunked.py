"""``apsched audit --what-if-chunked``: which nodes are split, and the bound for the parts."""

import json
from pathlib import Path

import networkx as nx

from apsched.capture.fake_world import world
from apsched.config import Caps
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import save_graph
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.bound import loose_program
from apsched.solver.bounds.any_order.chunked import chunked_bound
from apsched.solver.bounds.best import any_order_bound
from apsched.solver.bounds.linear_program import costs_of
from apsched.what_if.chunked import WhatIfChunked, around_path, what_if_chunked
from apsched.what_if.chunked import line as in_one_line
from tests.conftest import Run
from tests.helpers.graphs.toy_graphs import FlatCosts, capture_toy
from tests.helpers.problems.by_hand import ByHand, line

ANYWHERE = Caps(max_compute_move=None)


def in_parts(problem: Problem, split: set[str], num_parts: int) -> int:
    small = problem_arrays(problem)
    nodes = frozenset(problem.node_names.index(name) for name in split)
    whole = loose_program(
        Instance(problem=problem, arrays=small),
        Orders(Instance(problem=problem, arrays=small)),
        costs_of(Instance(problem=problem, arrays=small, caps=ANYWHERE)),
    )
    return chunked_bound(whole, problem, nodes, num_parts).ticks


def whole_bound(problem: Problem) -> int:
    small = problem_arrays(problem)
    return any_order_bound(
        Instance(problem=problem, arrays=small, caps=ANYWHERE),
        Orders(Instance(problem=problem, arrays=small)),
    ).ticks


def program(num_parts: int) -> Problem:
    """Two layers of product, reduction on the path, product; each node in ``num_parts``, what
    stands between the layers whole.
    """
    b = ByHand(prices={"all_reduce": line(10, 20)})
    x = b.input("x", 512)
    for i in range(2):
        outputs = []
        for j in range(num_parts):
            y = b.compute(f"first{i}.{j}", 80 // num_parts, x, size=512)
            size = 4096 // num_parts
            start = b.start(
                "all_reduce",
                f"ar{i}.{j}",
                y,
                size,
                size,
                group="tp",
                on_path=True,
                bucketable=False,
            )
            y = b.wait(f"w{i}.{j}", start)
            outputs.append(b.compute(f"second{i}.{j}", 60 // num_parts, y, size=512))
        x = b.compute(f"between{i}", 7, *outputs, size=512)
    return b.output(x)


def toy(num_shards: int) -> nx.DiGraph:
    """A step with one reduction on the path, which FX captured."""
    with world(2) as running:
        graph = capture_toy(next(iter(running.group_ranks)), 2, num_shards=num_shards)
        return export_graph(
            graph, FlatCosts(), group_ranks=running.group_ranks, cluster_name="flat"
        )


def test_the_bound_in_parts_is_that_of_the_program_in_parts() -> None:
    """Written out part by part; with nothing to split it is the bound with compute anywhere."""
    split = {f"{name}{i}.0" for i in range(2) for name in ("first", "ar", "second")}
    assert in_parts(program(1), set(), 2) == whole_bound(program(1)) == 2 * (80 + 10 + 80 + 60 + 7)
    for num_parts in (2, 4):
        assert in_parts(program(1), split, num_parts) == whole_bound(program(num_parts))
    assert in_parts(program(1), split, 2) == 2 * (
        40 + 2 * (10 + 40) + 30 + 7
    )  # on the wire one part after the other
    assert in_parts(program(1), split - {"ar0.0", "ar1.0"}, 2) == whole_bound(
        program(1)
    )  # halves that wait for a whole


def test_what_is_split_reaches_from_product_to_product() -> None:
    """Back to the product before the reduction, on to the two behind it; what lies further out
    stays whole.
    """
    dag = toy(8)
    problem = build_problem(dag)
    split = {problem.node_names[node] for node in around_path(dag)}
    on_path = [problem.node_names[c.start] for c in problem.collectives if c.on_path]
    assert len(on_path) == 1
    assert split == {"mm_7", "tanh_7", "mul", *on_path, "mm_8", "mm_9", "sum_1"}
    found = what_if_chunked(dag, problem, Caps())
    assert (found.num_parts, found.num_collectives, found.num_compute_nodes) == (2, 1, 6)


def test_the_line_says_what_there_is_to_win() -> None:
    found = WhatIfChunked(
        num_parts=2, num_collectives=3, num_compute_nodes=9, whole_us=2000.0, bound_us=1500.0
    )
    assert "25.00 % to win at best (idealised" in in_one_line("forward", found)
    worse = WhatIfChunked(
        num_parts=2, num_collectives=3, num_compute_nodes=9, whole_us=2000.0, bound_us=2001.0
    )
    assert " 0.00 % to win" in in_one_line("forward", worse)


def test_audit_prints_it_where_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    save_graph(toy(2), tmp_path / "toy.graph")
    ran = run(
        "audit", "toy.graph", "--budget", "0", "--memory-cap", "none", "--what-if-chunked", "--json"
    )
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)["audit"][0]
    assert (found["what_if_chunked"]["num_parts"], found["what_if_chunked"]["num_collectives"]) == (
        2,
        1,
    )
    assert 0 < found["what_if_chunked"]["whole_us"] <= found["step_time_us"]
    assert (
        "what_if_chunked"
        not in json.loads(
            run("audit", "toy.graph", "--budget", "0", "--memory-cap", "none", "--json").stdout
        )["audit"][0]
    )
    nothing = WhatIfChunked(
        num_parts=2, num_collectives=0, num_compute_nodes=0, whole_us=2.0, bound_us=2.0
    )
    assert in_one_line("forward", nothing) == "forward: no collective on the path to split"
