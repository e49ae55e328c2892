"""Forward and backward of one step under one choice: graphs, problems and solved schedules."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from apsched.config import Caps
from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.names import direction_named, name_of
from apsched.pipeline.device_memory import beside_graph
from apsched.pipeline.load import LoadedGraph, loaded_graph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import (
    SolveRequest,
    completed,
    lowered,
    resolve_caps,
    solve_graph,
    solve_on_one_device,
)
from apsched.problem.contention_spec import with_node_groups
from apsched.problem.problem import Problem, with_contention
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.solver.bounds.whole_step import bytes_beside, seam_bytes
from apsched.solver.requested import solve_requested
from apsched.units import allocated_bytes
from apsched.whole_step.choices import Choice, Parameter
from apsched.whole_step.rules import by_rules, together_by_plan

if TYPE_CHECKING:
    from apsched.capture.captured import CapturedGraph
    from apsched.capture.keep import Keepable

Graphs = tuple[LoadedGraph, LoadedGraph]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPair:
    """Forward and backward of some of the micro-batches."""

    count: int
    """Micro-batches that run them."""
    graphs: Graphs
    gradient_bytes: tuple[int, int]
    """Gradients of the micro-batches before, outside of each graph."""
    shard_bytes: int
    """Shards of kept parameters, outside of backward."""

    @property
    def beside_bytes(self) -> tuple[int, int]:
        """Memory of the step outside of each graph."""
        forward, backward = self.gradient_bytes
        return forward, backward + self.shard_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedChoice:
    """Both graphs under one choice, solved."""

    kept: Choice
    kept_bytes: int
    beside_bytes: int
    """Shards of kept parameters: alive in backward, though not an input of it."""
    graphs: Graphs
    results: tuple[Result, Result]

    @property
    def may_improve(self) -> bool:
        """Whether CP-SAT was left out, which may find faster schedules."""
        return any(result.answer.may_improve for result in self.results)

    @property
    def is_final(self) -> bool:
        """Whether nothing was left out of the answers, as a search alone does."""
        return all(result.answer.is_final for result in self.results)

    @property
    def bound_ticks(self) -> int:
        """No schedules of both graphs are faster."""
        return sum(result.answer.bound_ticks for result in self.results)

    @property
    def fits(self) -> bool:
        """Whether both graphs have a schedule within the caps."""
        return all(result.best is not None for result in self.results)

    @property
    def step_ticks(self) -> int:
        """Forward and backward, one after the other."""
        return sum(r.best.step_time_ticks for r in self.results if r.best is not None)

    @property
    def least_bytes(self) -> int:
        """The least memory for which schedules of both are known."""
        forward, backward = (result.answer.floor_memory_bytes for result in self.results)
        return max(forward, backward + self.beside_bytes)

    @property
    def peak_bytes(self) -> int:
        """The higher peak of both."""
        return max(self._peaks)

    @property
    def peak_graph(self) -> str:
        """The name of the graph that has it; forward where both have."""
        forward, backward = self._peaks
        return self.results[backward > forward].problem.name

    @property
    def _peaks(self) -> tuple[int, int]:
        forward, backward = (r.best.peak_memory_bytes if r.best else 0 for r in self.results)
        return forward, backward + self.beside_bytes


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its graphs as captured, every parameter gathered again, and the parameters that may
    be kept.
    """

    graphs: Graphs
    request: SolveRequest
    progress: Progress
    cap_bytes: tuple[int | None, int | None]
    """Of forward and of backward, as they are with every parameter gathered again."""
    always: Choice
    """Parameters that a rule of the plan keeps."""
    never: Choice
    """Parameters that a rule of the plan has gathered again."""
    parameters: tuple[Parameter, ...] = ()
    solved: dict[Choice, SolvedChoice] = field(default_factory=dict)
    """Choices that were solved already."""
    made: dict[Choice, Graphs] = field(default_factory=dict)
    beside_kept: dict[Choice, tuple[int, int]] = field(default_factory=dict)
    """Choice -> :func:`apsched.solver.bounds.whole_step.bytes_beside` of forward and of
    backward.
    """

    @classmethod
    def of(cls, graphs: Iterable[LoadedGraph], request: SolveRequest, progress: Progress) -> Self:
        """Return the step that ``graphs``, under the plan, are; ``InputError`` where they are not a
        forward and a backward graph with FX graphs.
        """
        graphs = pair_of(graphs)
        gathered = {c.module for graph in graphs for c in graph.problem.collectives if c.module}
        names = [p.name for p in parameters_of(graphs)]
        always, never = by_rules(request.plan, names, gathered)
        step = cls(
            graphs=graphs,
            request=request,
            progress=progress,
            cap_bytes=(None, None),
            always=always,
            never=never,
        )
        problems = [graph.problem for graph in step.least]
        found = parameters_of(graphs, problems[1])
        kind = {CollectiveKind.ALL_GATHER}
        together = together_by_plan({p.name: p.name for p in found}, problems, kind)
        parameters = tuple(replace(p, together=together[p.name]) for p in found)
        return replace(step, parameters=parameters).with_cap(request.memory_cap)

    def with_cap(self, memory_cap: MemoryCap | None) -> Self:
        """Return this step under another memory cap, with the graphs that are made already; a floor
        is that with only those parameters kept that a rule keeps.
        """
        request = replace(self.request, memory_cap=memory_cap)
        step = replace(self, request=request, solved={})
        if memory_cap is not None and memory_cap.above_floor:
            return step.above_floor_of(self.pairs_of(self.always))
        forward, backward = (
            resolve_caps(graph, request, self.progress).memory_cap_bytes for graph in self.graphs
        )
        return replace(step, cap_bytes=(forward, backward))

    def above_floor_of(self, pairs: Iterable[CountedPair]) -> Self:
        """Return this step with its memory cap, if that is one above a floor, above the least
        memory that fits all of ``pairs``, the graphs of one choice.
        """
        memory_cap = self.request.memory_cap
        if memory_cap is None or not memory_cap.above_floor:
            return self
        cap_bytes = max(
            (resolve_caps(graph, self.request, self.progress).memory_cap_bytes or 0) + beside
            for pair in pairs
            for graph, beside in zip(pair.graphs, pair.beside_bytes, strict=True)
        )
        return replace(self, cap_bytes=(cap_bytes, cap_bytes), solved={})

    def with_more(self, size_bytes: int) -> Self:
        """Return this step with memory caps that are looser by ``size_bytes``."""
        forward, backward = (cap if cap is None else cap + size_bytes for cap in self.cap_bytes)
        return replace(self, cap_bytes=(forward, backward), solved={})

    @property
    def least(self) -> Graphs:
        """The graphs with only those parameters kept that a rule keeps."""
        return self.under(self.always)

    @property
    def undecided(self) -> tuple[Parameter, ...]:
        """The parameters that no rule decides on."""
        return tuple(p for p in self.parameters if p.name not in self.always | self.never)

    @property
    def most(self) -> Choice:
        """All parameters but those that a rule has gathered again."""
        return Choice(p.name for p in self.parameters) - self.never

    @property
    def caps(self) -> tuple[Caps, Caps]:
        """The caps of forward and of backward with every parameter gathered again."""
        forward, backward = (
            replace(self.request.caps, memory_cap_bytes=cap) for cap in self.cap_bytes
        )
        return forward, backward

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are left for kept parameters, beside those that a rule keeps, while all that
        may be kept are alive; ``None`` without a memory cap.
        """
        _, backward = self._beside_most
        cap = self.cap_bytes[1]
        left = [self.free_before_backward]
        if cap is not None:
            left.append(cap - backward - self.beside_bytes(self.most))
        return min((one for one in left if one is not None), default=None)

    @property
    def free_before_backward(self) -> int | None:
        """As :attr:`free_bytes`, up to the first node of backward."""
        forward, backward = seam_bytes(*(graph.problem for graph in self.least))
        seams = max(forward, self._beside_most[0]), backward + self.beside_bytes(self.always)
        left = [
            cap - seam for cap, seam in zip(self.cap_bytes, seams, strict=True) if cap is not None
        ]
        return min(left, default=None)

    @property
    def _beside_most(self) -> tuple[int, int]:
        if self.most not in self.beside_kept:
            names = {name for p in self.undecided for name in p.values}
            caps = list(self.caps)
            if caps[0].max_compute_move:  # parameters that stay gathered leave nodes out of forward
                caps[0] = replace(caps[0], max_compute_move=None)
            forward, backward = (
                bytes_beside(graph.problem, limits, storages_behind(graph, names))
                for graph, limits in zip(self.under(self.most), caps, strict=True)
            )
            self.beside_kept[self.most] = forward, backward
        return self.beside_kept[self.most]

    @property
    def entry_bytes(self) -> dict[str, int]:
        """Entry of a choice -> bytes passed from forward to backward."""
        return {entry: size for p in self.parameters for entry, size in p.entries.items()}

    @property
    def entries(self) -> tuple[str, ...]:
        """All entries that a choice may have."""
        return tuple(self.entry_bytes)

    def beside_bytes(self, kept: Choice) -> int:
        """Return the bytes of shards that are alive in backward beside its graph."""
        names = set(map(name_of, kept))
        return sum(p.beside_bytes for p in self.parameters if p.name in names)

    def under(self, kept: Choice) -> Graphs:
        """Return the graphs with the parameters ``kept``, priced again."""
        if not kept:
            return self.graphs
        if kept not in self.made:
            first, second = (self.posed(graph) for graph in with_kept(self.graphs, kept))
            self.made[kept] = first, second
        return self.made[kept]

    def pairs_of(self, kept: Choice) -> tuple[CountedPair, ...]:
        """Return the graphs with the parameters ``kept``, and the memory outside of each."""
        graphs, shards = self.under(kept), self.beside_bytes(kept)
        return (CountedPair(count=1, graphs=graphs, gradient_bytes=(0, 0), shard_bytes=shards),)

    def posed(self, graph: LoadedGraph) -> LoadedGraph:
        """Return ``graph`` under the plan of the request."""
        problem, without = self.request.posed(graph.problem)
        return replace(graph, problem=problem, without_bitwise=without)

    def search(self, kept: Choice) -> SolvedChoice:
        """Return both graphs solved with the parameters ``kept``, by the search alone if they were
        not solved yet.
        """
        return self.solved[kept] if kept in self.solved else self.solve(kept, search_alone=True)

    def solve(self, kept: Choice, *, search_alone: bool = False) -> SolvedChoice:
        """Return both graphs solved with the parameters ``kept``; each choice once."""
        known = self.solved.get(kept)
        if known is None or not (known.is_final or search_alone):
            graphs = self.under(kept)
            beside = self.beside_bytes(kept)
            size = sum(self.entry_bytes[entry] for entry in kept)
            words = "solve" if known is None else "solve again"
            with self.progress.stage(f"{words} with {len(kept)} parameters kept"):
                first, second = self.caps
                more = self.communicator_bytes(graphs)
                caps = lowered(first, more), lowered(second, more + beside)
                if known is None or known.may_improve:
                    forward, backward = self.solve_all(graphs, caps, search_alone=search_alone)
                else:
                    forward, backward = (completed(r, self.request) for r in known.results)
            self.solved[kept] = SolvedChoice(
                kept=kept,
                kept_bytes=size,
                beside_bytes=beside,
                graphs=graphs,
                results=(forward, backward),
            )
        return self.solved[kept]

    def communicator_bytes(self, graphs: Graphs) -> int:
        """Return the bytes of the communicators that ``graphs`` have beside those as captured, if
        the cap is the memory of the device.
        """
        if self.request.memory_cap is not None:
            return 0
        counts = [
            max(g.beside.communicator_bytes if g.beside else 0 for g in pair)
            for pair in (graphs, self.graphs)
        ]
        return counts[0] - counts[1]

    def solve_all(
        self, graphs: Sequence[LoadedGraph], caps: Sequence[Caps], *, search_alone: bool
    ) -> tuple[Result, ...]:
        """Return ``graphs`` of one choice solved within ``caps``; they share a device."""

        def solve(graph: LoadedGraph, limits: Caps, request: SolveRequest) -> Result:
            return replace(self, request=request).solve_graph(
                graph, limits, search_alone=search_alone
            )

        return solve_on_one_device(graphs, caps, self.request, solve)

    def progress_of(self, graph: LoadedGraph) -> Callable[..., None]:
        """Return the function to which a search reports its progress on ``graph``."""
        name, report = graph.problem.name, self.progress.solver
        return lambda stage, *figures: report(f"{name}, {stage}", *figures)

    def solve_graph(self, graph: LoadedGraph, caps: Caps, *, search_alone: bool = False) -> Result:
        """Return ``graph`` solved within ``caps``; ``search_alone`` without CP-SAT, and without the
        reasons if nothing fits.
        """
        search = partial(
            solve_requested, search_alone=search_alone, progress=self.progress_of(graph)
        )
        return solve_graph(graph, self.request, Progress(quiet=True), caps=caps, search=search)


def pair_of(graphs: Iterable[LoadedGraph], stated: str = "") -> Graphs:
    """Return ``graphs`` as forward and backward; ``InputError`` where they are not that, or come
    without FX graphs. It begins with ``stated``, the option that asks for both.
    """
    stated = f"{stated}: " if stated else ""
    graphs = tuple(graphs)
    if any(graph.captured is None for graph in graphs):
        raise InputError(
            f"{stated}expected forward and backward as FX graphs, since kept parameters, a frontier"
            " of the step and accumulation change both, found a graph file; solve the source that"
            " it was made of, or the file without these options"
        )
    if [direction_named(g.problem.name) for g in graphs] != ["forward", "backward"]:
        raise InputError(
            f"{stated}expected one forward and one backward graph, since kept parameters, a"
            " frontier of the step and accumulation change both, found"
            f" {', '.join(g.problem.name for g in graphs)}; solve both graphs as one source, or"
            " these without such options"
        )
    return graphs[0], graphs[1]


def may_keep(graphs: Sequence[LoadedGraph]) -> bool:
    """Return whether ``graphs`` are forward and backward, with FX graphs, and both gather a
    parameter.
    """
    names = [direction_named(graph.problem.name) for graph in graphs]
    if names != ["forward", "backward"] or any(graph.captured is None for graph in graphs):
        return False
    return bool(parameters_of((graphs[0], graphs[1])))


def parameters_of(graphs: Graphs, backward: Problem | None = None) -> tuple[Parameter, ...]:
    """Return the parameters that both graphs gather; ``backward`` is the problem whose collectives
    they name, by default that of ``graphs``.
    """
    from apsched.capture.keep import keepable  # torch, which graph files do without

    first, second = (graph.captured for graph in graphs)
    assert first is not None
    assert second is not None
    problem = graphs[1].problem if backward is None else backward
    found = keepable(first, second, graphs[1].nodes)
    return tuple(_parameter(one, problem) for one in found)


def with_kept(graphs: Graphs, kept: Choice) -> Graphs:
    """Return ``graphs`` with the parameters ``kept``, priced again in the same way, with the same
    contention.
    """
    if not kept:
        return graphs
    from apsched.capture.keep import keep

    forward, backward = (graph.captured for graph in graphs)
    assert forward is not None
    assert backward is not None
    pair = keep(forward, backward, kept, graphs[1].nodes)
    first, second = (priced_as(old, new) for old, new in zip(graphs, pair, strict=True))
    first, second = beside_each_other(first, second)
    return first, second


def storages_behind(graph: LoadedGraph, names: Collection[str]) -> frozenset[int]:
    """Return the storages behind the nodes ``names``."""
    nodes = (node for node, name in enumerate(graph.problem.node_names) if name in names)
    return frozenset(s for node in nodes for s in storages_of(graph, node))


def storages_of(graph: LoadedGraph, node: int) -> tuple[int, ...]:
    """Return the storages behind a node."""
    record = graph.dag.nodes[node]["record"]
    return (*record.allocates, *record.aliases)


def kept_tensors(again: Sequence[LoadedGraph], kept: Graphs) -> dict[str, tuple[str, ...]]:
    """Return graph -> nodes whose values are kept in ``kept``, made of the pair ``again``: outputs
    of forward, inputs of backward.
    """
    from apsched.capture import keep

    first, second, one, two = (graph.captured for graph in (*pair_of(again), *kept))
    assert first is not None
    assert second is not None
    assert one is not None
    assert two is not None
    return keep.kept_tensors((first, second), (one, two))


def priced_as(old: LoadedGraph, captured: "CapturedGraph") -> LoadedGraph:
    """Return the graph ``captured``, priced as ``old``."""
    from apsched.fx.collectives import group_name, is_collective

    assert old.cost_model is not None
    groups = {group_name(node) for node in captured.module.graph.nodes if is_collective(node)}
    used = {around: node for around, node in old.nodes.items() if node.name in groups}
    new = loaded_graph(
        captured,
        old.cost_model,
        cluster=old.dag.graph["cluster"],
        group_ranks={**old.group_ranks, **{node.name: node.ranks for node in used.values()}},
        device_memory_bytes=old.device_memory_bytes,
        nodes=old.nodes,
        progress=Progress(quiet=True),
    )
    new = replace(new, group_ranks=old.group_ranks, seconds=old.seconds, beside=old.beside)
    contention = old.problem.contention
    if contention is not None:
        names = {around: node.name for around, node in used.items()}
        contention = with_node_groups(contention, names)
    return replace(new, problem=with_contention(new.problem, contention))


def beside_each_other(*graphs: LoadedGraph) -> tuple[LoadedGraph, ...]:
    """Return ``graphs``, whose memory beside them is that of another choice, with their own."""
    dags = [graph.dag for graph in graphs]
    return tuple(
        replace(g, beside=None if g.beside is None else beside_graph(g.beside, g.dag, dags))
        for g in graphs
    )


def _parameter(found: "Keepable", backward: Problem) -> Parameter:
    again, parts = found.again, found.node.num_ranks if found.node is not None else 0
    return Parameter(
        name=found.name,
        size_bytes=sum(map(allocated_bytes, again.value_bytes)),
        num_elements=again.num_elements,
        beside_bytes=allocated_bytes(again.shard_bytes) if again.frees_shard else 0,
        gathers=tuple(
            c
            for c, one in enumerate(backward.collectives)
            if backward.node_names[one.start] in again.gathers
        ),
        values=tuple(dict.fromkeys(name for name, _ in again.values)),
        node_bytes=sum(allocated_bytes(size // parts) for size in again.value_bytes)
        if parts
        else 0,
    )
