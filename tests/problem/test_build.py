"""From a DAG with records to integers: rounding, keys, lifetimes, and what travels with a
collective.
"""

from dataclasses import dataclass, field

import networkx as nx
import pytest

from apsched.costs.price_curve import PriceCurve
from apsched.graph.records import CollectiveRecord, NodeRecord, StorageRecord
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem

FLAT = PriceCurve(size_bytes=(0, 1), price_ticks=(7, 7))


@dataclass
class Graph:
    """A DAG node by node; every method returns the rank of the node it adds."""

    records: list[NodeRecord] = field(default_factory=list)
    edges: list[tuple[int, int, str]] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)
    storage_of: dict[int, int] = field(default_factory=dict)
    curves: dict[str, PriceCurve] = field(default_factory=lambda: {"copy": FLAT})

    def add(
        self,
        kind: NodeKind,
        name: str,
        args: tuple[int, ...],
        duration_us: float = 0.0,
        size: int | None = None,
        **fields,
    ) -> int:
        rank = len(self.records)
        self.edges += [(arg, rank, "data") for arg in args]
        allocates: tuple[int, ...] = ()
        if size is not None:
            allocates = (len(self.storages),)
            self.storages.append(StorageRecord(size_bytes=size, kept=fields.pop("kept", False)))
            self.storage_of[rank] = allocates[0]
        record = {
            "name": name,
            "rank": rank,
            "op": "call_function",
            "target": "",
            "kind": kind,
            "duration_us": duration_us,
            "cost_source": "free",
            "allocates": allocates,
            "reads": tuple(self.storage_of[arg] for arg in args if arg in self.storage_of),
            "writes": (),
            "aliases": (),
            "frees": (),
            "module": "",
            "direction": "forward",
            "dtype": "",
            "role": "",
            "signature": "",
            "collective": None,
        }
        self.records.append(NodeRecord(**(record | fields)))
        return rank

    def input(self, name: str, size: int = 512, *, kept: bool = True) -> int:
        return self.add(NodeKind.INPUT, name, (), size=size, kept=kept)

    def compute(self, name: str, *args: int, size: int = 512, duration_us: float = 1.0) -> int:
        return self.add(NodeKind.COMPUTE, name, args, duration_us, size)

    def view(self, name: str, arg: int) -> int:
        rank = self.add(NodeKind.VIEW, name, (arg,), aliases=(self.storage_of[arg],))
        self.storage_of[rank] = self.storage_of[arg]
        return rank

    def collective(
        self,
        kind: str,
        name: str,
        arg: int,
        *,
        input_bytes: int = 512,
        output_bytes: int = 1024,
        duration_us=0.5,
        **fields,
    ) -> int:
        """Add a start node and, right after it, its wait; return the wait."""
        start = len(self.records)
        record = {
            "kind": kind,
            "group": "dp",
            "group_size": 2,
            "reduce_op": "" if kind == "all_gather" else "sum",
            "dtype": "bf16",
            "device": "cuda",
            "input_bytes": input_bytes,
            "output_bytes": output_bytes,
            "size_bytes": output_bytes if kind == "all_gather" else input_bytes,
            "wait": start + 1,
            "on_path": False,
            "bucketable": True,
            "holds_input": True,
            "num_members": 1,
        }
        c = CollectiveRecord(**(record | fields))
        self.curves.setdefault(f"{kind}:{c.group}", FLAT)
        self.add(NodeKind.START, name, (arg,), duration_us, output_bytes, collective=c)
        wait = self.add(NodeKind.WAIT, f"{name}_wait", (start,), aliases=(self.storage_of[start],))
        self.storage_of[wait] = self.storage_of[start]
        return wait

    def problem(self, *outputs: int) -> Problem:
        self.add(NodeKind.OUTPUT, "output", outputs)
        dag = nx.DiGraph(
            name="graph",
            storages=tuple(self.storages),
            curves=self.curves,
            cluster="",
            group_ranks={},
        )
        dag.add_nodes_from((r.rank, {"record": r}) for r in self.records)
        dag.add_edges_from((u, v, {"kind": kind}) for u, v, kind in self.edges)
        return build_problem(dag)


def names(problem: Problem, nodes) -> list[str]:
    return [problem.node_names[node] for node in nodes]


def test_durations_round_up_to_ticks_and_bytes_to_what_the_allocator_takes() -> None:
    graph = Graph()
    x = graph.input("x", 1000, kept=False)
    problem = graph.problem(graph.compute("a", x, size=513, duration_us=1.0001))
    assert problem.duration_ticks == (0, 1001, 0)
    assert [s.size_bytes for s in problem.storages] == [1024, 1024]


def test_storages_know_birth_and_uses() -> None:
    """An input is there before the first node; views use what they share; a wait uses what its
    collective sends and receives.
    """
    graph = Graph()
    x = graph.input("x", kept=False)
    a = graph.compute("a", x)
    gathered = graph.collective("all_gather", "ag", graph.view("v", a))
    problem = graph.problem(graph.compute("b", gathered))
    assert [s.birth for s in problem.storages] == [-1, 1, 3, 5]
    assert [names(problem, s.uses) for s in problem.storages] == [
        ["x", "a"],
        ["a", "v", "ag", "ag_wait"],
        ["ag", "ag_wait", "b"],
        ["b", "output"],
    ]
    (c,) = problem.collectives
    assert (c.input_storage, c.output_storage) == (1, 2)


def test_an_input_that_is_not_held_is_not_used_by_the_wait() -> None:
    graph = Graph()
    a = graph.compute("a", graph.input("x"))
    problem = graph.problem(
        graph.collective("all_reduce", "ar", a, output_bytes=512, holds_input=False)
    )
    assert names(problem, problem.storages[1].uses) == ["a", "ar"]


def test_what_a_graph_keeps_is_kept() -> None:
    graph = Graph()
    problem = graph.problem(graph.compute("a", graph.input("w"), graph.input("x", kept=False)))
    assert [s.kept for s in problem.storages] == [True, False, False]


def test_order_edges_bind_like_data() -> None:
    graph = Graph()
    a, b = graph.compute("a"), graph.compute("b")
    graph.edges.append((a, b, "order"))
    problem = graph.problem(b)
    assert names(problem, problem.predecessors[b]) == ["a"]


@pytest.mark.parametrize(
    "other",
    [
        {"group": "tp"},
        {"dtype": "fp32"},
        {"device": "cpu"},
        {"reduce_op": "avg"},
        {"group_size": 4},
    ],
)
def test_a_key_is_kind_group_reduce_op_dtype_and_device(other: dict) -> None:
    graph = Graph()
    w = graph.input("w")
    waits = [
        graph.collective("all_reduce", f"ar{i}", w, **fields)
        for i, fields in enumerate(({}, other, {}))
    ]
    problem = graph.problem(*waits)
    assert [c.key for c in problem.collectives] == [0, 1, 0]


def test_streams_are_groups_in_order_of_appearance() -> None:
    """Gathers and reductions of one group share its stream, and have keys of their own."""
    graph = Graph()
    w = graph.input("w")
    waits = [
        graph.collective("all_gather", "ag", w, group="dp"),
        graph.collective("all_reduce", "ar", w, group="tp"),
        graph.collective("reduce_scatter", "rs", w, group="dp"),
    ]
    problem = graph.problem(*waits)
    assert problem.streams == ("dp", "tp")
    assert [(k.kind, k.stream) for k in problem.keys] == [
        ("all_gather", 0),
        ("all_reduce", 1),
        ("reduce_scatter", 0),
    ]


def test_the_launch_of_a_bucket_is_its_curve_or_else_the_cheapest_captured_one() -> None:
    def launch_ticks(curves: dict[str, PriceCurve]) -> int:
        graph = Graph()
        graph.curves.update(curves)
        w = graph.input("w")
        return (
            graph.problem(
                *(
                    graph.collective("all_gather", f"ag{us}", w, duration_us=us)
                    for us in (0.5, 0.2, 0.9)
                )
            )
            .keys[0]
            .launch_ticks
        )

    assert launch_ticks({}) == 200
    assert (
        launch_ticks({"launch:all_gather:dp": PriceCurve(size_bytes=(0, 1), price_ticks=(90, 90))})
        == 90
    )


def test_the_cast_of_a_shard_travels_with_its_gather() -> None:
    """Through views, and as a chain; what also serves others, or takes something computed, keeps
    its place.
    """
    graph = Graph()
    w, u, v = graph.input("w"), graph.input("u"), graph.input("v")
    chain = graph.compute("scale", graph.view("view", w))
    g1 = graph.collective("all_gather", "g1", graph.view("flat", graph.compute("cast", chain)))
    shared = graph.compute("shared", u)
    g2 = graph.collective("all_gather", "g2", shared)
    a = graph.compute("a", shared)
    mixed = graph.compute("mixed", v, a)
    g3 = graph.collective("all_gather", "g3", mixed)
    problem = graph.problem(graph.compute("b", a, g1, g2, g3))
    assert [names(problem, c.prologue) for c in problem.collectives] == [["scale", "cast"], [], []]
    assert names(problem, problem.compute_order) == ["shared", "a", "mixed", "b"]


def test_what_others_wait_for_is_no_prologue() -> None:
    """Nothing reads ``dead``, but a write to its input comes behind it, and the gather behind that:
    it cannot go with the gather.
    """
    graph = Graph()
    w = graph.input("w")
    a = graph.compute("a", graph.input("x"))
    dead = graph.compute("dead", w)
    write = graph.compute("write", w, a)
    graph.edges.append((dead, write, "order"))
    g = graph.collective("all_gather", "g", graph.compute("cast", write))
    problem = graph.problem(graph.compute("b", a, g))
    assert names(problem, problem.collectives[0].prologue) == []
    assert names(problem, problem.compute_order) == ["a", "dead", "write", "cast", "b"]


def test_a_bucket_casts_what_the_graph_says_it_may() -> None:
    """The cast and the views behind it, where the cast serves the gather alone; half of what is
    read and written counts as copied.
    """
    graph = Graph()
    w, u = graph.input("w"), graph.input("u")
    cast = graph.compute("cast", graph.compute("scale", graph.view("view", w)))
    g1 = graph.collective(
        "all_gather", "g1", graph.view("flat", cast), input_bytes=512, cast_bytes=1024
    )
    g2 = graph.collective("all_gather", "g2", graph.compute("half", u), input_bytes=512)
    problem = graph.problem(graph.compute("a", g1, g2))
    assert [names(problem, c.cast) for c in problem.collectives] == [["cast", "flat"], []]
    assert [c.copied_bytes for c in problem.collectives] == [768, 512]


def test_what_finishes_a_reduction_travels_with_its_wait() -> None:
    """Casts and updates with inputs that end in outputs or in another reduction."""
    graph = Graph()
    w, state = graph.input("w"), graph.input("state")
    a = graph.compute("a", w)
    rs = graph.collective("reduce_scatter", "rs", a, input_bytes=1024, output_bytes=512)
    ar = graph.collective("all_reduce", "ar", graph.compute("divide", rs), output_bytes=512)
    update = graph.compute("update", graph.compute("cast", ar), state)
    problem = graph.problem(update, a)
    assert [names(problem, c.epilogue) for c in problem.collectives] == [
        ["divide"],
        ["cast", "update"],
    ]
    assert names(problem, problem.compute_order) == ["a"]


def test_what_compute_needs_is_no_epilogue() -> None:
    graph = Graph()
    rs = graph.collective(
        "reduce_scatter", "rs", graph.compute("a", graph.input("w")), output_bytes=512
    )
    norm = graph.compute("norm", rs)
    other = graph.compute("other", graph.input("x"))
    problem = graph.problem(graph.compute("clip", norm, other))
    assert problem.collectives[0].epilogue == ()
    assert "norm" in names(problem, problem.compute_order)


def test_an_epilogue_may_need_what_its_start_needs() -> None:
    """``copy`` stands behind the wait whatever moves; ``late`` may have to wait for ``other``."""
    graph = Graph()
    gradients = [graph.compute(f"gradient{i}", graph.input(f"x{i}")) for i in range(2)]
    sums = [
        graph.collective("all_reduce", f"ar{i}", graph.compute(f"half{i}", g), output_bytes=512)
        for i, g in enumerate(gradients)
    ]
    other = graph.compute("other", graph.input("y"))
    copy = graph.compute("copy", gradients[0], sums[0])
    problem = graph.problem(copy, graph.compute("late", other, sums[1]))
    assert [names(problem, c.epilogue) for c in problem.collectives] == [["copy"], []]
    assert names(problem, problem.compute_order)[-2:] == ["other", "late"]


def test_what_needs_compute_is_no_epilogue() -> None:
    """``scale`` belongs to the compute, since ``layer`` needs it; so does ``update``, which needs
    ``scale``.
    """
    graph = Graph()
    rs = graph.collective(
        "reduce_scatter", "rs", graph.compute("a", graph.input("w")), output_bytes=512
    )
    scale = graph.compute("scale", rs)
    layer = graph.compute("layer", scale, graph.compute("b", graph.input("x")))
    problem = graph.problem(layer, graph.compute("update", rs, scale))
    assert problem.collectives[0].epilogue == ()
    assert names(problem, problem.compute_order) == ["a", "scale", "b", "layer", "update"]


def test_compute_keeps_its_place_where_only_one_collective_and_inputs_surround_it() -> None:
    """A layer that takes one gathered weight is no epilogue of the gather, nor a gradient of inputs
    a prologue of its reduction.
    """
    graph = Graph()
    layer = graph.compute(
        "layer", graph.collective("all_gather", "ag", graph.input("w")), graph.input("x")
    )
    gradient = graph.compute("gradient", graph.input("saved"), graph.input("tangent"))
    problem = graph.problem(
        layer, graph.collective("reduce_scatter", "rs", gradient, output_bytes=512)
    )
    assert names(problem, problem.compute_order) == ["layer", "gradient"]


def test_on_path_collectives_take_nothing_along() -> None:
    graph = Graph()
    g = graph.collective(
        "all_gather", "ag", graph.compute("cast", graph.input("w")), on_path=True, bucketable=False
    )
    problem = graph.problem(graph.compute("a", g))
    assert problem.collectives[0].prologue == ()
    assert problem.collectives[0].on_path


def test_a_collective_that_writes_where_it_reads_stays_alone() -> None:
    graph = Graph()
    a = graph.compute("a", graph.input("w"))
    s = graph.storage_of[a]
    c = {
        "kind": "all_reduce",
        "group": "dp",
        "group_size": 2,
        "reduce_op": "sum",
        "dtype": "bf16",
        "device": "cuda",
        "wait": 3,
    }
    c |= {
        "input_bytes": 512,
        "output_bytes": 512,
        "size_bytes": 512,
        "on_path": False,
        "bucketable": True,
        "holds_input": True,
    }
    graph.curves["all_reduce:dp"] = FLAT
    start = graph.add(
        NodeKind.START,
        "ar_",
        (a,),
        writes=(s,),
        aliases=(s,),
        collective=CollectiveRecord(**c, num_members=1),
    )
    problem = graph.problem(graph.add(NodeKind.WAIT, "wait", (start,), aliases=(s,)))
    (collective,) = problem.collectives
    assert not collective.bucketable
    assert collective.input_storage == collective.output_storage == s
