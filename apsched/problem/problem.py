"""The scheduling problem as integers: no torch, no networkx.

A node is its rank in the graph as captured. Times are ticks, memory is bytes as the allocator takes
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from apsched.costs.price_curve import PriceCurve
from apsched.errors import InputError
from apsched.kinds import CollectiveKind, KernelCut, NodeKind
from apsched.problem.contention import Contention
from apsched.problem.restriction import UNRESTRICTED, Restriction


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One piece of memory: alive from its birth to its last use."""

    size_bytes: int
    """As allocated (rounded up)."""
    birth: int
    """Node that allocates it; -1 where it is alive before the first node."""
    kept: bool
    """The caller holds it throughout."""
    uses: tuple[int, ...]
    """Nodes that need it alive, ascending: they allocate, read, write or share it, or wait for a
    collective that reads it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The properties that members of one bucket share, and the prices of such a bucket."""

    kind: CollectiveKind
    group: str
    group_size: int
    reduce_op: str
    dtype: str
    device: str
    stream: int
    """Index of the group's stream."""
    price: PriceCurve
    """Bytes (counted once) -> ticks on the group's stream."""
    launch_ticks: int
    """Price of one launch on the compute stream."""
    coalesced_member_ticks: int | None = None
    """Price that each member of a coalesced bucket adds to that of its bytes, on the group's
    stream; ``None``: that form has no price, and the solver does not use it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as captured."""

    start: int
    wait: int
    key: int
    """Index of its key."""
    size_bytes: int
    """The size that its price depends on, counted once."""
    input_bytes: int
    output_bytes: int
    input_storage: int
    output_storage: int
    holds_input: bool
    """The input stays alive until the wait."""
    on_path: bool
    bucketable: bool
    """It can share a launch, under any plan."""
    prologue: tuple[int, ...]
    """Compute nodes that serve only its start (the cast of a parameter); they travel with the
    start.
    """
    cast: tuple[int, ...] = ()
    """The last of its prologue, a cast, and views of its result: a bucket has none of them, since
    its copy-in casts on the way.
    """
    cast_bytes: int = 0
    """Bytes that the cast reads; 0 if there is no cast."""
    epilogue: tuple[int, ...]
    """Compute nodes that only finish its result for the graph's outputs; they travel with the
    wait.
    """
    module: str
    output_place: int = -1
    """Place of its result among the graph's outputs, which is that of its parameter in order of
    registration; -1 where unknown.
    """
    direction: str = ""
    """``forward`` or ``backward``; empty where unknown."""
    restriction: Restriction = UNRESTRICTED
    """The requirements of the user's plan."""

    @property
    def may_share(self) -> bool:
        """Whether it can share a launch and the plan allows it."""
        return self.bucketable and not self.restriction.alone

    @property
    def may_be_coalesced(self) -> bool:
        """Whether its bucket may be one without a buffer."""
        return self.may_share and not self.restriction.flat

    @property
    def copied_bytes(self) -> int:
        """Bytes that it adds to a copy-in, which reads and writes as many: half of the bytes read
        and written, rounded up.
        """
        return (self.cast_bytes + self.input_bytes + 1) // 2 if self.cast else self.input_bytes


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The input of simulate, verify and the solver: nodes, storages, collectives and prices."""

    name: str
    graph_hash: str
    node_names: tuple[str, ...]
    kinds: tuple[NodeKind, ...]
    duration_ticks: tuple[int, ...]
    """Time on the compute stream; of a start, the price of its launch as captured."""
    predecessors: tuple[tuple[int, ...], ...]
    """For each node the nodes that must come before it (data and order)."""
    modules: tuple[str, ...]
    storages: tuple[Storage, ...]
    keys: tuple[Key, ...]
    collectives: tuple[Collective, ...]
    """Ordered by start node."""
    streams: tuple[str, ...]
    """Group name of each stream."""
    copy_price: PriceCurve
    """Bytes copied -> ticks on the compute stream, of a copy-in or a copy-out."""
    kernels: tuple[int, ...] = ()
    """For each node the first of those that a compiler makes one kernel of, -1 for none; empty
    if unknown.
    """
    cuts: tuple[KernelCut, ...] = ()
    """Places where kernels may be cut, and the prices (:mod:`apsched.schedule.kernel_cuts`)."""
    chains: tuple[int, ...] = ()
    """For each node the number of its chain, one of several micro-batches that do not depend on
    each other; -1 for shared nodes. Empty if there is one chain.
    """
    reordered: tuple[int, ...] = ()
    """The compute nodes that do not travel, in the order that the solver looks at; empty for that
    as captured.
    """
    rules: tuple[str, ...] = ()
    """The rules of the plan that restricts its collectives, as the user wrote them."""
    contention: Contention | None = None
    """The contention of streams; ``None``: none."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.kinds)

    @cached_property
    def collective_of_node(self) -> dict[int, int]:
        """Start or wait node -> index of its collective."""
        return {
            node: c
            for c, collective in enumerate(self.collectives)
            for node in (collective.start, collective.wait)
        }

    @cached_property
    def travels(self) -> frozenset[int]:
        """Compute nodes that travel with a collective instead of keeping their place among the
        compute nodes.
        """
        return frozenset(node for c in self.collectives for node in (*c.prologue, *c.epilogue))

    @property
    def compute_order(self) -> tuple[int, ...]:
        """Compute nodes that do not travel, in the order looked at."""
        return self.reordered or self.captured_order

    @cached_property
    def captured_order(self) -> tuple[int, ...]:
        """Compute nodes that do not travel, as captured."""
        return tuple(
            i
            for i, kind in enumerate(self.kinds)
            if kind is NodeKind.COMPUTE and i not in self.travels
        )

    @cached_property
    def captured_chains(self) -> tuple[tuple[int, ...], ...]:
        """The compute order as captured, each chain apart, without nodes of no chain."""
        if not self.chains:
            return (self.captured_order,)
        apart: dict[int, list[int]] = {}
        for node in self.captured_order:
            apart.setdefault(self.chains[node], []).append(node)
        apart.pop(-1, None)
        return tuple(tuple(nodes) for nodes in apart.values())

    @cached_property
    def shared_order(self) -> tuple[int, ...]:
        """The compute nodes of no chain, as captured: sums over micro-batches, masks."""
        return tuple(n for n in self.captured_order if self.chains and self.chains[n] < 0)

    @cached_property
    def captured_places(self) -> dict[int, int]:
        """Node -> its place in the compute order as captured."""
        return {node: place for place, node in enumerate(self.captured_order)}

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes that must come after it, ascending."""
        after: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, before in enumerate(self.predecessors):
            for p in before:
                after[p].append(node)
        return tuple(tuple(nodes) for nodes in after)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that the caller holds throughout."""
        return sum(s.size_bytes for s in self.storages if s.kept)

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """For each collective the compute nodes that need its result, ascending; empty where only
        outputs do.
        """
        compute_order = frozenset(self.compute_order)
        return tuple(_needing(self, c.wait, compute_order) for c in self.collectives)


def _needing(problem: Problem, wait: int, compute_order: frozenset[int]) -> tuple[int, ...]:
    """Return the compute nodes reached from ``wait`` through nodes that take no place of their
    own.
    """
    seen, stack, found = {wait}, [wait], set()
    while stack:
        for node in problem.successors[stack.pop()]:
            if node in compute_order:
                found.add(node)
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return tuple(sorted(found))


def with_contention(problem: Problem, contention: Contention | None) -> Problem:
    """Return ``problem`` on a machine where streams and compute slow each other down like that."""
    return replace(problem, contention=contention)


def without_plan(problem: Problem) -> Problem:
    """Return ``problem`` without the user's plan; the same object where no plan restricts a
    collective.
    """
    if all(c.restriction == UNRESTRICTED for c in problem.collectives):
        return problem
    collectives = tuple(replace(c, restriction=UNRESTRICTED) for c in problem.collectives)
    return replace(problem, collectives=collectives, rules=())


def check_problem(problem: Problem) -> None:
    """Raise InputError where ``problem`` breaks an invariant that other modules rely on."""
    n = problem.num_nodes
    for label, values in (
        ("node_names", problem.node_names),
        ("duration_ticks", problem.duration_ticks),
        ("predecessors", problem.predecessors),
        ("modules", problem.modules),
    ):
        _require(len(values) == n, f"{label} has {len(values)} entries for {n} nodes")
    _require(
        len(problem.chains) in (0, n), f"chains has {len(problem.chains)} entries for {n} nodes"
    )
    for node, before in enumerate(problem.predecessors):
        _require(
            all(0 <= p < node for p in before),
            f"node {problem.node_names[node]}: predecessors must come before it in the captured"
            " order",
        )
    _require(all(d >= 0 for d in problem.duration_ticks), "durations must not be negative")
    for s, storage in enumerate(problem.storages):
        _require(storage.size_bytes >= 0, f"storage {s} has a negative size")
        _require(
            -1 <= storage.birth < n,
            f"storage {s} is allocated by node {storage.birth}, which does not exist",
        )
        _require(
            _ascending(storage.uses) and all(0 <= u < n for u in storage.uses),
            f"storage {s}: uses must be nodes in ascending order",
        )
        _require(
            storage.birth < 0 or storage.uses[:1] == (storage.birth,),
            f"storage {s}: the first use must be its birth",
        )
    for cut in problem.cuts:
        _check_cut(problem, cut)
    for c in problem.collectives:
        _check_collective(problem, c)
        _check_cast(problem, c)
        _check_bytes(problem, c)
        _check_restriction(problem, c)
    _require(
        _ascending([c.start for c in problem.collectives]),
        "collectives must be ordered by their start node",
    )
    belong = problem.collective_of_node
    for node, kind in enumerate(problem.kinds):
        _require(
            kind not in (NodeKind.START, NodeKind.WAIT) or node in belong,
            f"node {problem.node_names[node]}: a {kind} node must belong to a collective",
        )


def _check_cut(problem: Problem, cut: KernelCut) -> None:
    compute_order, places, kernels = (
        problem.captured_order,
        problem.captured_places,
        problem.kernels,
    )
    at = places.get(cut.node, 0)
    _require(
        len(kernels) == problem.num_nodes
        and at > 0
        and kernels[compute_order[at - 1]] == kernels[cut.node] >= 0,
        f"a kernel is cut between two compute nodes of it that follow each other; node {cut.node}"
        " is not the second of such",
    )
    _require(
        len(cut.nodes) == len(cut.extra_ticks)
        and all(kernels[node] == kernels[cut.node] and node in places for node in cut.nodes)
        and all(ticks > 0 for ticks in cut.extra_ticks),
        f"node {problem.node_names[cut.node]}: a cut makes compute nodes of its kernel slower",
    )


def _check_collective(problem: Problem, c: Collective) -> None:
    n, name = problem.num_nodes, problem.node_names[c.start]
    _require(0 <= c.start < c.wait < n, f"collective {name}: the wait must follow the start")
    _require(
        problem.kinds[c.start] is NodeKind.START and problem.kinds[c.wait] is NodeKind.WAIT,
        f"collective {name}: start or wait has the wrong kind",
    )
    _require(0 <= c.key < len(problem.keys), f"collective {name}: key {c.key} does not exist")
    _require(
        all(0 <= s < len(problem.storages) for s in (c.input_storage, c.output_storage)),
        f"collective {name}: a storage does not exist",
    )
    _require(
        all(problem.kinds[i] is NodeKind.COMPUTE and i < c.start for i in c.prologue)
        and all(problem.kinds[i] is NodeKind.COMPUTE and i > c.wait for i in c.epilogue),
        f"collective {name}: a prologue is compute before the start, an epilogue compute after the"
        " wait",
    )


def _check_cast(problem: Problem, c: Collective) -> None:
    name, given = problem.node_names[c.start], problem.storages[c.input_storage]
    _require(
        c.cast[0] == c.prologue[-1:][0] if c.cast and c.prologue else not c.cast,
        f"collective {name}: a cast is the last of its prologue",
    )
    chain = zip(c.cast, (*c.cast[1:], c.start), strict=False)
    _require(
        all(problem.successors[node] == (after,) for node, after in chain)
        and (not c.cast or given.birth == c.cast[0]),
        f"collective {name}: a cast, and views of its result, serve nothing but the start",
    )
    _require(
        c.cast_bytes > 0 if c.cast else c.cast_bytes == 0,
        f"collective {name}: a cast reads bytes, and nothing else does",
    )


def _check_bytes(problem: Problem, c: Collective) -> None:
    name, given, result = (
        problem.node_names[c.start],
        problem.storages[c.input_storage],
        problem.storages[c.output_storage],
    )
    _require(
        min(c.size_bytes, c.input_bytes, c.output_bytes) >= 0, f"collective {name}: negative bytes"
    )
    _require(
        c.start in given.uses and c.start in result.uses,
        f"collective {name}: the start must use its input and its output",
    )
    _require(c.wait in result.uses, f"collective {name}: the wait must use the output")
    _require(
        not c.holds_input or c.wait in given.uses,
        f"collective {name}: the wait must use the input that it holds",
    )
    _require(
        not c.bucketable or (result.birth == c.start and not result.kept),
        f"collective {name}: in a bucket it cannot write where it reads",
    )


def _check_restriction(problem: Problem, c: Collective) -> None:
    name, restriction, last = problem.node_names[c.start], c.restriction, len(problem.compute_order)
    for gaps in (restriction.start_slots, restriction.wait_slots):
        _require(
            gaps is None or 0 <= gaps[0] <= gaps[1] <= last,
            f"collective {name}: {gaps} are no gaps of {last} compute nodes",
        )
    _require(
        restriction.group is None or c.may_share,
        f"collective {name}: a collective that stays alone is in no group",
    )
    _require(
        restriction.wait_slots is None or not c.may_share,
        f"collective {name}: only a collective that stays alone has a place for its wait",
    )
    _require(
        restriction.group is not None or not restriction.closed,
        f"collective {name}: only a group can be closed",
    )
    _require(
        all(0 <= rule < len(problem.rules) for rule in restriction.rules),
        f"collective {name}: a rule does not exist",
    )


def _ascending(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(f"not a valid problem: {message}")
