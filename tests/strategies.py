"""Random small problems: built straight as integers, no torch.

``random_problem(rng)`` and ``random_caps(rng, problem)`` take any ``random.Random``; the hypothesis strategies hand them one that
hypothesis controls, so that a failure shrinks.
"""

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from apsched.config import Caps
from apsched.graph.dag import NodeKind
from apsched.price_curve import PriceCurve
from apsched.problem import Collective, Key, Problem, Storage, check_problem
from apsched.schedule import as_captured
from apsched.simulate import simulate
from apsched.units import allocated_bytes


@st.composite
def a_problem(draw, max_collectives: int = 4, max_spine: int = 5) -> Problem:
    """A problem with 1 to ``max_collectives`` collectives and 2 to ``max_spine`` compute nodes that keep their order."""
    return random_problem(draw(st.randoms(use_true_random=False)), max_collectives=max_collectives, max_spine=max_spine)


@st.composite
def a_problem_with_caps(draw, max_collectives: int = 4, max_spine: int = 5) -> tuple[Problem, Caps]:
    """A problem and caps, of which some bind, some do not and some cannot hold."""
    rng = draw(st.randoms(use_true_random=False))
    problem = random_problem(rng, max_collectives=max_collectives, max_spine=max_spine)
    return problem, random_caps(rng, problem)


def random_caps(rng: random.Random, problem: Problem) -> Caps:
    """Return caps around what the order as captured needs; each is ``None`` about half the time."""
    peak = simulate(problem, as_captured(problem.num_nodes)).peak_memory_bytes
    largest = max(c.size_bytes for c in problem.collectives)
    most = max(c.output_bytes for c in problem.collectives)

    def perhaps(low: int, high: int) -> int | None:
        return rng.randint(low, max(low, high)) if rng.random() < 0.4 else None

    return Caps(
        memory_cap_bytes=rng.randint(peak * 2 // 3, peak * 3 // 2) if rng.random() < 0.6 else None,
        bucket_cap_bytes=perhaps(0, 3 * largest),
        max_topo_span=perhaps(0, problem.num_nodes),
        max_prefetch=perhaps(0, len(problem.spine)),
        in_flight_cap_bytes=perhaps(most, 3 * most),
    )


def random_problem(rng: random.Random, *, max_collectives: int = 4, max_spine: int = 5) -> Problem:
    """Return a problem of FSDP (gathers and reductions), HSDP (reduce-scatter, then all-reduce), DDP and on-path collectives."""
    draft = _Draft(rng)
    num_spine = rng.randint(2, max_spine)
    budget = rng.randint(1, max_collectives)
    gathers, reductions, on_path = [], [], []
    while budget > 0:
        what = rng.choice(("gather", "gather", "gather", "reduce", "reduce", "chain", "on_path"))
        if what == "gather":
            first = rng.randrange(num_spine)
            start = rng.randint(0, first)
            needs = sorted({first, *(i for i in range(first, num_spine) if rng.random() < 0.2)})
            gathers.append((start, rng.randint(start, first), needs if rng.random() < 0.95 else []))
        elif what == "on_path":
            after = rng.randrange(num_spine - 1)
            on_path.append((after, rng.randint(after + 1, num_spine - 1)))
        else:
            chained = what == "chain" and budget >= 2
            budget -= chained
            reductions.append((rng.randrange(num_spine), rng.randint(0, 2), chained))
        budget -= 1
    return _assemble(draft, num_spine, gathers, reductions, on_path)


def _assemble(draft: "_Draft", num_spine: int, gathers: list, reductions: list, on_path: list) -> Problem:
    rng = draft.rng
    shards = [draft.shard(needs) for _, _, needs in gathers]
    activations = [draft.activation(rng.randrange(num_spine)) for _ in range(rng.randint(0, 2))]
    live: dict[int, list] = {}  # slot -> what happens right before that spine node
    for g, (start, wait, needs) in enumerate(gathers):
        live.setdefault(start, []).append(lambda g=g: draft.start_gather(shards[g]))
        live.setdefault(wait, []).append(lambda g=g, needs=needs: draft.wait_gather(shards[g], needs))
    for i in range(num_spine):
        for act in live.get(i, ()):
            act()
        draft.spine_node(i, [a for a in activations if a.needed_by == i])
        for after, until in on_path:
            if after == i:
                draft.on_path(i, until)
        for producer, wait_after, chained in reductions:
            if producer == i:
                draft.start_reduction(i, chained, min(i + wait_after, num_spine - 1))
        draft.finish_reductions(i)
    return draft.finish()


@dataclass
class _Pending:
    collective: dict
    shard: int = -1
    storage: int = -1
    needed_by: int = -1
    wait_at: int = -1
    chained: bool = False
    input_view: int = -1


@dataclass
class _Draft:
    """Nodes and storages of a problem under construction, in captured order."""

    rng: random.Random
    names: list[str] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    storages: list[dict] = field(default_factory=list)
    collectives: list[dict] = field(default_factory=list)
    keys: dict[tuple, dict] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    spine: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    given: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # spine position -> (node, storage) it needs
    outputs: list[tuple[int, int]] = field(default_factory=list)  # (node, storage)
    open_reductions: list[_Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.unit = rng.choice((1, 7, 300, 513, 1024))
        self.pace = rng.choice((3, 10, 40))
        self.holds = rng.random() < 0.8
        self.own_stream = rng.random() < 0.4
        self.launch = rng.choice((0, 0, 1, 3))
        self.world = rng.choice((2, 4))

    def node(self, kind: NodeKind, label: str, duration: int, before: set[int]) -> int:
        self.names.append(f"{label}_{len(self.names)}")
        self.kinds.append(kind)
        self.durations.append(duration)
        self.before.append(before)
        return len(self.names) - 1

    def storage(self, size: int, birth: int, *, kept: bool = False) -> int:
        self.storages.append({"size": size, "birth": birth, "kept": kept, "uses": {birth} - {-1}})
        return len(self.storages) - 1

    def use(self, storage: int, *nodes: int) -> None:
        self.storages[storage]["uses"].update(nodes)

    def bytes(self) -> int:
        return self.rng.randint(1, 9) * self.unit + self.rng.choice((0, 0, 1, 5))

    def shard(self, needs: list[int]) -> _Pending:
        node = self.node(NodeKind.INPUT, "shard", 0, set())
        size = self.bytes()
        storage = self.storage(size, -1, kept=self.rng.random() < 0.8)
        self.use(storage, node)
        return _Pending(collective={"input_bytes": size}, shard=node, storage=storage)

    def activation(self, needed_by: int) -> _Pending:
        node = self.node(NodeKind.INPUT, "activation", 0, set())
        storage = self.storage(self.bytes(), -1)
        self.use(storage, node)
        return _Pending(collective={}, shard=node, storage=storage, needed_by=needed_by)

    def start_gather(self, p: _Pending) -> None:
        rng = self.rng
        source, storage, prologue = p.shard, p.storage, ()
        size = p.collective["input_bytes"]
        if rng.random() < 0.3:
            source = self.node(NodeKind.VIEW, "view", 0, {source})
            self.use(storage, source)
        if rng.random() < 0.4:
            source = self.node(NodeKind.COMPUTE, "cast", rng.randint(0, 3), {source})
            self.use(storage, source)
            size = max(1, size // 2)
            storage = self.storage(size, source)
            prologue = (source,)
            if rng.random() < 0.3:
                source = self.node(NodeKind.VIEW, "view", 0, {source})
                self.use(storage, source)
        key = self.key("all_gather", "dp", rng.choice(("bf16", "bf16", "fp32")))
        p.collective = self.start(key, source, storage, size, size * self.world, prologue=prologue, on_path=False)

    def wait_gather(self, p: _Pending, needs: list[int]) -> None:
        node, storage = self.wait(p.collective)
        if self.rng.random() < 0.3:
            node = self.node(NodeKind.VIEW, "view", 0, {node})
            self.use(storage, node)
        for i in needs:
            self.given.setdefault(i, []).append((node, storage))
        if not needs:
            self.outputs.append((node, storage))

    def spine_node(self, i: int, activations: list[_Pending]) -> None:
        rng = self.rng
        taken = [*self.given.get(i, ()), *((a.shard, a.storage) for a in activations)]
        if self.spine and rng.random() < 0.8:
            taken.append((self.spine[-1], self.results[-1]))
        node = self.node(NodeKind.COMPUTE, "compute", rng.randint(0, self.pace), {n for n, _ in taken})
        self.spine.append(node)
        self.results.append(self.storage(self.bytes(), node))
        for _, storage in taken:
            self.use(storage, node)
        if rng.random() < 0.15:
            self.outputs.append((node, self.results[-1]))

    def on_path(self, after: int, until: int) -> None:
        size = self.bytes()
        storage = self.storage(size, self.spine[after]) if self.rng.random() < 0.5 else self.results[after]
        key = self.key("all_reduce", "tp", "bf16")
        c = self.start(key, self.spine[after], storage, size, size, on_path=True)
        self.given.setdefault(until, []).append(self.wait(c))

    def start_reduction(self, i: int, chained: bool, wait_at: int) -> None:
        size = self.bytes()
        source, storage = self.spine[i], self.storage(size * self.world, self.spine[i])
        if self.rng.random() < 0.3:
            source = self.node(NodeKind.VIEW, "view", 0, {source})
            self.use(storage, source)
        if chained or self.rng.random() < 0.7:
            key = self.key("reduce_scatter", "dp_grads" if self.own_stream else "dp", "fp32")
            c = self.start(key, source, storage, size * self.world, size, on_path=False)
        else:
            key = self.key("all_reduce", "replicate", "fp32")
            c = self.start(key, source, storage, size * self.world, size * self.world, on_path=False)
        self.open_reductions.append(_Pending(collective=c, wait_at=wait_at, chained=chained))

    def finish_reductions(self, i: int) -> None:
        for p in [p for p in self.open_reductions if p.wait_at <= i]:
            self.open_reductions.remove(p)
            node, storage = self.wait(p.collective)
            if p.chained:
                size = p.collective["output_bytes"]
                p.collective = self.start(self.key("all_reduce", "replicate", "fp32"), node, storage, size, size, on_path=False)
                node, storage = self.wait(p.collective)
            if self.rng.random() < 0.4:
                node = self.node(NodeKind.COMPUTE, "finish", self.rng.randint(0, 3), {node})
                self.use(storage, node)
                storage = self.storage(max(1, p.collective["output_bytes"] * self.rng.choice((1, 2)) // 2), node)
                p.collective["epilogue"] = (node,)
            self.outputs.append((node, storage))

    def key(self, kind: str, group: str, dtype: str) -> int:
        if group not in self.streams:
            self.streams.append(group)
        fields = {"kind": kind, "group": group, "dtype": dtype, "stream": self.streams.index(group)}
        self.keys.setdefault((kind, group, dtype), fields | {"index": len(self.keys), "price": self.price()})
        return self.keys[kind, group, dtype]["index"]

    def price(self) -> PriceCurve:
        """Latency, then a slope that changes once or twice: up (protocol switch) or down."""
        rng = self.rng
        sizes, prices = [0], [rng.randint(0, 15)]
        for _ in range(rng.randint(1, 3)):
            step = rng.randint(1, 12) * self.unit
            sizes.append(sizes[-1] + step)
            prices.append(prices[-1] + rng.randint(0, 12))
        return PriceCurve(size_bytes=tuple(sizes), price_ticks=tuple(prices))

    def start(self, key: int, source: int, storage: int, input_bytes: int, output_bytes: int, *, on_path: bool, prologue=()) -> dict:
        node = self.node(NodeKind.START, "start", self.launch + self.rng.choice((0, 0, 1)), {source})
        self.use(storage, node)
        kind = next(k["kind"] for k in self.keys.values() if k["index"] == key)
        c = {
            "start": node,
            "key": key,
            "size_bytes": output_bytes if kind == "all_gather" else input_bytes,
            "input_bytes": input_bytes,
            "output_bytes": output_bytes,
            "input_storage": storage,
            "output_storage": self.storage(output_bytes, node),
            "holds_input": self.holds,
            "on_path": on_path,
            "bucketable": not on_path and self.rng.random() < 0.9,
            "prologue": prologue,
            "epilogue": (),
            "module": "",
        }
        self.collectives.append(c)
        return c

    def wait(self, c: dict) -> tuple[int, int]:
        c["wait"] = self.node(NodeKind.WAIT, "wait", 0, {c["start"]})
        self.use(c["output_storage"], c["wait"])
        if c["holds_input"]:
            self.use(c["input_storage"], c["wait"])
        return c["wait"], c["output_storage"]

    def finish(self) -> Problem:
        self.finish_reductions(len(self.spine))
        self.outputs.append((self.spine[-1], self.results[-1]))
        out = self.node(NodeKind.OUTPUT, "output", 0, {n for n, _ in self.outputs})
        for _, storage in self.outputs:
            self.use(storage, out)
        problem = Problem(
            name="random",
            graph_hash="",
            node_names=tuple(self.names),
            kinds=tuple(self.kinds),
            duration_ticks=tuple(self.durations),
            predecessors=tuple(tuple(sorted(b)) for b in self.before),
            modules=("",) * len(self.names),
            storages=tuple(
                Storage(size_bytes=allocated_bytes(s["size"]), birth=s["birth"], kept=s["kept"], uses=tuple(sorted(s["uses"])))
                for s in self.storages
            ),
            keys=tuple(self._key(k) for k in self.keys.values()),
            collectives=tuple(Collective(**c) for c in sorted(self.collectives, key=lambda c: c["start"])),
            streams=tuple(self.streams),
            copy_price=PriceCurve(size_bytes=(0, 4 * self.unit), price_ticks=(self.rng.choice((0, 1)), self.rng.choice((1, 2, 6)))),
        )
        check_problem(problem)
        return problem

    def _key(self, k: dict) -> Key:
        cheapest = min(self.durations[c["start"]] for c in self.collectives if c["key"] == k["index"])
        return Key(
            kind=k["kind"],
            group=k["group"],
            group_size=self.world,
            reduce_op="" if k["kind"] == "all_gather" else "sum",
            dtype=k["dtype"],
            device="cuda",
            stream=k["stream"],
            price=k["price"],
            launch_ticks=cheapest,
        )
