"""A random problem under construction: nodes in captured order, storages, collectives of every
sort, straight as integers.
"""

import random
from dataclasses import dataclass, field

from apsched.costs.price_curve import PriceCurve
from apsched.kinds import NodeKind
from apsched.problem.problem import Collective, Key, Problem, Storage, check_problem
from apsched.units import allocated_bytes


def random_curve(rng: random.Random, unit: int, most_latency: int, most_rise: int) -> PriceCurve:
    """Return a price of one of the shapes that measured tables have, with breakpoints at some
    multiples of ``unit``.

    ====================  ==========================================================
    line                  latency, then one slope
    floor                 max(latency, bytes / bandwidth): the first bytes cost nothing more
    concave               slopes fall with size (small messages do not fill the wire)
    steps                 slopes go up and down (protocols and algorithms switch)
    ====================  ==========================================================
    """
    latency = rng.randint(0, most_latency)
    shape = rng.choice(("line", "floor", "concave", "steps"))
    rises = [rng.randint(0, most_rise) for _ in range(1 if shape == "line" else rng.randint(2, 4))]
    steps = [rng.randint(1, 12) * unit for _ in rises]
    if shape == "floor":
        rises[0] = 0
    if shape == "concave":
        steps, rises = [steps[0]] * len(steps), sorted(rises, reverse=True)
    sizes, prices = [0], [latency]
    for step, rise in zip(steps, rises, strict=True):
        sizes.append(sizes[-1] + step)
        prices.append(prices[-1] + rise)
    return PriceCurve(size_bytes=tuple(sizes), price_ticks=tuple(prices))


@dataclass
class Tensor:
    """A node's result and the storage that it lies in."""

    node: int
    storage: int


@dataclass
class Reduction:
    """A reduction that is started and not yet waited for."""

    collective: dict
    wait_at: int
    chained: bool


@dataclass
class Draft:
    """Nodes and storages of a problem under construction, in captured order.

    ``rng`` decides what comes next and may be replaced (repeated layers replay one); ``table``
    decides prices and what all have in common.
    """

    rng: random.Random
    table: random.Random
    units: tuple[int, ...] = (1, 7, 300, 513, 1024)
    """Sizes are small multiples of one of these, and a few bytes, all times ``grain``."""
    grain: int = 1
    chained: float = 0.8
    """How often a compute node takes the result of the one before."""
    added: float = 0.0
    """How often a later compute node takes the result of a reduction, as a sum over micro-batches
    does.
    """
    copied: float = 0.0
    """How often the first node that finishes a reduction also reads the gradient, as the copy of
    DDP's reducer does.
    """
    parts: float = 0.0
    """How many of the on-path collectives gather the part that a compute node copied, and may move,
    as those of parameters that are resharded in their node.
    """
    sized: float = 0.0
    """How often a view has a size that a compute node or a collective before it has decided."""
    names: list[str] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    storages: list[dict] = field(default_factory=list)
    collectives: list[dict] = field(default_factory=list)
    keys: dict[tuple, dict] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    compute_order: list[Tensor] = field(default_factory=list)
    given: dict[int, list[Tensor]] = field(default_factory=dict)
    """Spine position -> what it needs beside its predecessor."""
    outputs: list[Tensor] = field(default_factory=list)
    open_reductions: list[Reduction] = field(default_factory=list)
    module: str = ""

    def __post_init__(self) -> None:
        table = self.table
        self.unit = table.choice(self.units) * self.grain
        self.pace = table.choice((3, 10, 40))
        self.holds = table.random() < 0.8
        self.own_stream = table.random() < 0.4
        self.experts = table.random() < 0.3
        self.launch = table.choice((0, 0, 1, 3))
        self.world = table.choice((2, 4))
        self.copy_price = random_curve(table, self.unit, 2, 4)

    # nodes and storages

    def node(self, kind: NodeKind, label: str, duration: int, before: set[int]) -> int:
        self.names.append(f"{label}_{len(self.names)}")
        self.kinds.append(kind)
        self.durations.append(duration)
        self.before.append(before)
        self.modules.append(self.module)
        return len(self.names) - 1

    def storage(self, size: int, birth: int, *, kept: bool = False) -> int:
        self.storages.append({"size": size, "birth": birth, "kept": kept, "uses": {birth} - {-1}})
        return len(self.storages) - 1

    def use(self, storage: int, *nodes: int) -> None:
        self.storages[storage]["uses"].update(nodes)

    def perhaps_view(self, t: Tensor) -> Tensor:
        if self.rng.random() >= 0.3:
            return t
        return self.view(t)

    def view(self, t: Tensor, *sizes: int) -> Tensor:
        node = self.node(NodeKind.VIEW, "view", 0, {t.node, *sizes})
        self.use(t.storage, node)
        return Tensor(node, t.storage)

    def perhaps_sized(self, t: Tensor) -> Tensor:
        if not self.sized or self.rng.random() >= self.sized:
            return t
        nodes = [t.node for t in self.compute_order]
        nodes += [node for node, kind in enumerate(self.kinds) if kind is NodeKind.WAIT]
        return self.view(t, self.rng.choice(nodes)) if nodes else t

    def bytes(self) -> int:
        return self.rng.randint(1, 9) * self.unit + self.rng.choice((0, 0, 1, 5)) * self.grain

    def input(self, label: str, *, kept: bool) -> Tensor:
        node = self.node(NodeKind.INPUT, label, 0, set())
        storage = self.storage(self.bytes(), -1, kept=kept)
        self.use(storage, node)
        return Tensor(node, storage)

    def shard(self) -> Tensor:
        return self.input("shard", kept=self.rng.random() < 0.8)

    # what stands between compute nodes

    def start_gather(self, shard: Tensor) -> dict:
        """Start a gather: of the shard, of a view of it, or of what one or two compute nodes (a
        cast) make of it.
        """
        rng = self.rng
        t, size = self.perhaps_view(shard), self.storages[shard.storage]["size"]
        prologue: list[int] = []
        cast: dict = {}
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            node = self.node(NodeKind.COMPUTE, "cast", rng.randint(0, 3), {t.node})
            self.use(t.storage, node)
            cast = {"cast_bytes": size}
            size = max(1, size // 2)
            t = self.perhaps_view(Tensor(node, self.storage(size, node)))
            cast["cast"] = tuple(dict.fromkeys((node, t.node)))
            prologue.append(node)
        if rng.random() < 0.3:
            cast = {}  # compute that no copy does on its way
        group = "ep" if self.experts and rng.random() < 0.4 else "dp"
        key = self.key("all_gather", group, rng.choice(("bf16", "bf16", "bf16", "fp32")))
        c = self.start(key, t, size, size * self.world, prologue=tuple(prologue))
        c.update(cast)
        return c

    def wait_gather(self, c: dict, *, further: bool = False) -> Tensor:
        """Wait for it; ``further``: another gather, on the group of the other mesh dimension, takes
        its result and is waited for, too.
        """
        t = self.wait(c)
        if further:
            size = c["output_bytes"]
            t = self.wait(
                self.start(self.key("all_gather", "replicate", "bf16"), t, size, 2 * size)
            )
        return self.perhaps_sized(self.perhaps_view(t))

    def compute_node(self, i: int) -> None:
        rng = self.rng
        taken = list(self.given.get(i, ()))
        if self.compute_order and rng.random() < self.chained:
            taken.append(self.perhaps_sized(self.compute_order[-1]))
        node = self.node(
            NodeKind.COMPUTE, "compute", rng.randint(0, self.pace), {t.node for t in taken}
        )
        in_place = self.compute_order and rng.random() < 0.1
        storage = self.compute_order[-1].storage if in_place else self.storage(self.bytes(), node)
        if in_place:
            self.before[node].add(self.compute_order[-1].node)
        self.use(storage, node)
        for t in taken:
            self.use(t.storage, node)
        self.compute_order.append(Tensor(node, storage))
        if rng.random() < 0.15:
            self.outputs.append(self.compute_order[-1])

    def on_path(self, after: int, until: int) -> None:
        """A collective between two compute nodes: tensor or sequence parallel, experts; sometimes
        in place, or on the parameters' group.
        """
        rng = self.rng
        size, source = self.bytes(), self.compute_order[after]
        if rng.random() < 0.5:
            source = Tensor(source.node, self.storage(size, source.node))
        kind = rng.choice(
            ("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        )
        scale = {"all_gather": 2, "reduce_scatter": 0.5}.get(kind, 1)
        group = "dp" if rng.random() < 0.15 else "tp"
        in_place = kind == "all_reduce" and rng.random() < 0.2
        c = self.start(
            self.key(kind, group, "bf16"),
            source,
            size,
            max(1, int(size * scale)),
            on_path=True,
            in_place=in_place,
        )
        self.given.setdefault(until, []).append(self.wait(c))

    def copy_part(self) -> Tensor:
        """Copy a part of the result of the last compute node."""
        source = self.compute_order[-1]
        node = self.node(NodeKind.COMPUTE, "part", self.rng.randint(0, 3), {source.node})
        self.use(source.storage, node)
        return Tensor(node, self.storage(self.bytes(), node))

    def start_gather_of(self, part: Tensor) -> dict:
        """Start the gather of a part that compute has made."""
        group = self.rng.choice(("node", "node", "dp"))
        size = self.storages[part.storage]["size"]
        return self.start(self.key("all_gather", group, "bf16"), part, size, size * self.world)

    def start_reduction(self, i: int, chained: bool, wait_at: int) -> None:
        """Start the reduction of a gradient of compute node ``i``, which that allocates;
        ``chained``: scattered, then reduced again.
        """
        size, node = self.bytes(), self.compute_order[i].node
        t = self.perhaps_view(Tensor(node, self.storage(size * self.world, node)))
        t = self.perhaps_sized(t)
        if self.rng.random() < 0.1 and i + 1 not in self.given:
            self.given[i + 1] = [t]  # somebody else reads the gradient too: its norm
        if chained or self.rng.random() < 0.7:
            key, outputs = (
                self.key("reduce_scatter", "dp_grads" if self.own_stream else "dp", "fp32"),
                size,
            )
        else:
            key, outputs = self.key("all_reduce", "replicate", "fp32"), size * self.world
        c = self.start(key, t, size * self.world, outputs)
        self.open_reductions.append(Reduction(c, wait_at, chained))

    def finish_reductions(self, i: int, num_compute: int = 0) -> None:
        for r in [r for r in self.open_reductions if r.wait_at <= i]:
            self.open_reductions.remove(r)
            t, c = self.wait(r.collective), r.collective
            if r.chained:
                t = self.epilogue(c, t, 0.2)
                size = self.storages[t.storage]["size"]
                c = self.start(self.key("all_reduce", "replicate", "fp32"), t, size, size)
                t = self.wait(c)
            if self.added and i + 1 < num_compute and self.rng.random() < self.added:
                self.given.setdefault(self.rng.randrange(i + 1, num_compute), []).append(t)
                continue
            self.outputs.append(self.epilogue(c, t, 0.3))

    def epilogue(self, c: dict, t: Tensor, likely: float) -> Tensor:
        """Finish a result with up to two compute nodes: a division, a cast."""
        size = self.storages[t.storage]["size"]
        while len(c["epilogue"]) < 2 and self.rng.random() < likely:
            node = self.node(NodeKind.COMPUTE, "finish", self.rng.randint(0, 3), {t.node})
            self.use(t.storage, node)
            if self.copied and not c["epilogue"] and self.rng.random() < self.copied:
                self.before[node] |= self.before[c["start"]]
                self.use(c["input_storage"], node)
            size = max(1, size * self.rng.choice((1, 2)) // 2)
            t = self.perhaps_view(Tensor(node, self.storage(size, node)))
            c["epilogue"] += (node,)
        return t

    # collectives

    def key(self, kind: str, group: str, dtype: str) -> int:
        if group not in self.streams:
            self.streams.append(group)
        if (kind, group, dtype) not in self.keys:
            price = random_curve(self.table, self.unit, 15, 12)
            stream = self.streams.index(group)
            self.keys[kind, group, dtype] = {
                "index": len(self.keys),
                "kind": kind,
                "group": group,
                "dtype": dtype,
                "stream": stream,
            } | {"price": price}
        return self.keys[kind, group, dtype]["index"]

    def start(
        self,
        key: int,
        t: Tensor,
        input_bytes: int,
        output_bytes: int,
        *,
        on_path: bool = False,
        in_place: bool = False,
        prologue: tuple[int, ...] = (),
    ) -> dict:
        node = self.node(
            NodeKind.START, "start", self.launch + self.rng.choice((0, 0, 1)), {t.node}
        )
        self.use(t.storage, node)
        output = t.storage if in_place else self.storage(output_bytes, node)
        kind = next(k["kind"] for k in self.keys.values() if k["index"] == key)
        c = {
            "start": node,
            "key": key,
            "size_bytes": output_bytes if kind == "all_gather" else input_bytes,
            "input_bytes": input_bytes,
            "output_bytes": output_bytes,
            "input_storage": t.storage,
            "output_storage": output,
            "holds_input": self.holds,
            "on_path": on_path,
            "bucketable": not on_path and not in_place and self.rng.random() < 0.9,
            "prologue": prologue,
            "epilogue": (),
            "module": self.module,
        }
        self.collectives.append(c)
        return c

    def wait(self, c: dict) -> Tensor:
        c["wait"] = self.node(NodeKind.WAIT, "wait", 0, {c["start"]})
        self.use(c["output_storage"], c["wait"])
        if c["holds_input"]:
            self.use(c["input_storage"], c["wait"])
        return Tensor(c["wait"], c["output_storage"])

    def finish(self) -> Problem:
        """Add the output and return the problem."""
        self.finish_reductions(len(self.compute_order))
        self.outputs += [
            self.compute_order[-1],
            *(
                t
                for i, given in sorted(self.given.items())
                if i >= len(self.compute_order)
                for t in given
            ),
        ]
        out = self.node(NodeKind.OUTPUT, "output", 0, {t.node for t in self.outputs})
        for t in self.outputs:
            self.use(t.storage, out)
        problem = Problem(
            name="random",
            graph_hash="",
            node_names=tuple(self.names),
            kinds=tuple(self.kinds),
            duration_ticks=tuple(self.durations),
            predecessors=tuple(tuple(sorted(b)) for b in self.before),
            modules=tuple(self.modules),
            storages=tuple(
                Storage(
                    size_bytes=allocated_bytes(s["size"]),
                    birth=s["birth"],
                    kept=s["kept"],
                    uses=tuple(sorted(s["uses"])),
                )
                for s in self.storages
            ),
            keys=tuple(self._key(k) for k in self.keys.values()),
            collectives=tuple(
                Collective(**c) for c in sorted(self.collectives, key=lambda c: c["start"])
            ),
            streams=tuple(self.streams),
            copy_price=self.copy_price,
        )
        check_problem(problem)
        return problem

    def _key(self, k: dict) -> Key:
        cheapest = min(
            self.durations[c["start"]] for c in self.collectives if c["key"] == k["index"]
        )
        return Key(
            kind=k["kind"],
            group=k["group"],
            group_size=self.world,
            reduce_op="" if k["kind"] in ("all_gather", "all_to_all") else "sum",
            dtype=k["dtype"],
            device="cuda",
            stream=k["stream"],
            price=k["price"],
            launch_ticks=cheapest,
        )
