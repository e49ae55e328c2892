"""The hash of a graph: equal where the same schedule applies, different where anything that matters
differs.
"""

from dataclasses import replace

import networkx as nx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import data, integers, permutations, sampled_from

from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.graph.export.export import export_graph
from apsched.graph.identity import graph_hash
from apsched.kinds import NodeKind
from apsched.problem.build import build_problem
from apsched.solver import solve
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.instrumented import UnitCosts, capture_of, traced
from tests.helpers.graphs.toy_graphs import FlatCosts, capture_toy

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def step(
    rank=0, group="dp", op="sum", size=4, act=aten.sin.default, width=8, swap=False, extra=False
):
    def function(x, shard):
        part = aten.slice.Tensor(x, 0, 2 * rank, 2 * rank + 2)
        whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(shard, size, group))
        y = act(aten.mm.default(whole, aten.t.default(x)))
        total = c10d.wait_tensor.default(c10d.all_reduce.default(y, op, group))
        z = aten.sub.Tensor(y, total) if swap else aten.sub.Tensor(total, y)
        if extra:
            aten.add_.Tensor(x, 1.0)
        return z, part

    return function, [torch.randn(8, width), torch.randn(8 // size, width)]


def hash_of(kept=(), durations=1.0, rename=False, **change):
    function, inputs = step(**change)
    module = traced(function, inputs)
    if rename:
        for k, node in enumerate(module.graph.nodes):
            if node.op == "call_function":
                node.name = f"renamed_{k}"

    class Costs(UnitCosts):
        def compute_us(self, node):
            return durations

    ranks = {name: tuple(range(change.get("size", 4))) for name in ("dp", "17")}
    return graph_hash(export_graph(capture_of(module, kept), Costs(), group_ranks=ranks))


@pytest.mark.parametrize(
    "change",
    [{"rank": 3}, {"group": "17"}, {"durations": 2.0}, {"rename": True}],
    ids=lambda change: next(iter(change)),
)
def test_the_same_on_every_process_rank_and_whatever_the_names_and_prices(change):
    assert hash_of(**change) == hash_of()


@pytest.mark.parametrize(
    "change",
    [
        {"op": "avg"},
        {"size": 2},
        {"act": aten.cos.default},
        {"width": 16},
        {"swap": True},
        {"extra": True},
        {"kept": ("shard",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_different_where_it_matters(change):
    assert hash_of(**change) != hash_of()


# properties: one change of a real graph that matters, and changes that do not


SIZE = 2


@pytest.fixture(scope="module")
def toy():
    """The DAG of a training step with every kind of collective."""
    with world(SIZE) as running:
        group = next(iter(running.group_ranks))
        return export_graph(
            capture_toy(group, SIZE, num_shards=4), FlatCosts(), group_ranks={group: (0, 1)}
        )


def with_record(dag, rank, **change):
    """Return ``dag`` with one record changed."""
    changed = dag.copy()
    changed.nodes[rank]["record"] = replace(dag.nodes[rank]["record"], **change)
    return changed


def ranks_of(dag, kind=None):
    return [
        rank
        for rank in range(dag.number_of_nodes())
        if kind in (None, dag.nodes[rank]["record"].kind)
    ]


MATTERS = ("kind", "signature", "allocates", "reads", "writes", "aliases")
COLLECTIVE = (
    "kind",
    "group_size",
    "reduce_op",
    "dtype",
    "device",
    "input_bytes",
    "output_bytes",
    "wait",
)
NO_MATTER = {
    "name": "other",
    "module": "other",
    "duration_us": 77.0,
    "cost_source": "table",
    "direction": "other",
    "operation": "other",
}


@given(data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_field_that_matters_changes_the_hash_at_any_node(toy, data):
    field = data.draw(sampled_from(MATTERS))
    rank = data.draw(sampled_from(ranks_of(toy)))
    old = getattr(toy.nodes[rank]["record"], field)
    new = {
        "kind": NodeKind.OUTPUT if old is not NodeKind.OUTPUT else NodeKind.VIEW,
        "signature": "0" * 16,
    }.get(field, (*old, 999))
    assert graph_hash(with_record(toy, rank, **{field: new})) != graph_hash(toy)


@given(data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_figure_of_a_collective_changes_the_hash(toy, data):
    field = data.draw(sampled_from(COLLECTIVE))
    rank = data.draw(sampled_from(ranks_of(toy, NodeKind.START)))
    record = toy.nodes[rank]["record"].collective
    old = getattr(record, field)
    changed = replace(record, **{field: old + 1 if isinstance(old, int) else f"{old}x"})
    assert graph_hash(with_record(toy, rank, collective=changed)) != graph_hash(toy)


@given(data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edges_and_storages_change_the_hash(toy, data):
    changed = toy.copy()
    match data.draw(sampled_from(("gone", "new", "kind", "size", "kept"))):
        case "gone":
            changed.remove_edge(*data.draw(sampled_from(sorted(toy.edges))))
        case "new":
            last = toy.number_of_nodes() - 1
            first = data.draw(sampled_from([u for u in range(last) if not toy.has_edge(u, last)]))
            changed.add_edge(first, last, kind="order")
        case "kind":
            u, v = data.draw(sampled_from(sorted(toy.edges)))
            changed.edges[u, v]["kind"] = "order" if toy.edges[u, v]["kind"] == "data" else "data"
        case what:
            storages = list(toy.graph["storages"])
            at = data.draw(integers(0, len(storages) - 1))
            other = (
                {"size_bytes": storages[at].size_bytes + 1}
                if what == "size"
                else {"kept": not storages[at].kept}
            )
            storages[at] = replace(storages[at], **other)
            changed.graph["storages"] = tuple(storages)
    assert graph_hash(changed) != graph_hash(toy)


@given(data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_prices_and_the_order_in_which_edges_were_added_do_not(toy, data):
    changed = nx.DiGraph(**toy.graph)
    changed.graph |= {"name": "other", "cluster": "other", "group_ranks": {}}
    changed.add_nodes_from(
        data.draw(permutations(sorted(toy.nodes(data=True), key=lambda item: item[0])))
    )
    changed.add_edges_from(
        data.draw(permutations(sorted(toy.edges(data=True), key=lambda edge: edge[:2])))
    )
    for rank in ranks_of(toy):
        record = toy.nodes[rank]["record"]
        collective = (
            replace(record.collective, group=f"mesh_{record.collective.group}")
            if record.collective
            else None
        )
        changed.nodes[rank]["record"] = replace(record, **NO_MATTER, collective=collective)
    assert graph_hash(changed) == graph_hash(toy)


def test_buckets_that_write_at_the_place_of_their_process_rank_are_the_same_graph():
    """A graph written back holds the place of the process rank in a slice."""
    hashes = set()
    for rank in range(SIZE):
        with world(SIZE, rank) as running:
            group = next(iter(running.group_ranks))
            captured = capture_toy(group, SIZE, num_shards=4, process_rank=rank)
            problem = build_problem(
                export_graph(captured, FlatCosts(), group_ranks={group: (0, 1)})
            )
            best = solve(problem, Caps(), SolveOptions(budget=0.1)).best
            module = write_back(
                captured.module,
                problem,
                best.schedule,
                process_rank_of=lambda name, rank=rank: rank,
            )
            hashes.add(
                graph_hash(
                    export_graph(
                        replace(captured, module=module), FlatCosts(), group_ranks={group: (0, 1)}
                    )
                )
            )
    assert len(hashes) == 1
