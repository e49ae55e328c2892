"""Write a problem node by node, and a schedule as text, for tests that are worked out by hand."""

from dataclasses import dataclass, field

from apsched.costs.price_curve import PriceCurve
from apsched.kinds import NodeKind
from apsched.problem.problem import Collective, Key, Problem, Storage, check_problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.units import allocated_bytes

FREE = PriceCurve(size_bytes=(0, 1), price_ticks=(0, 0))
ONE_TICK_PER_KIB = PriceCurve(size_bytes=(0, 1024), price_ticks=(0, 1))


def line(latency_ticks: int, ticks_per_kib: int = 0) -> PriceCurve:
    """Return the price latency + bytes * slope."""
    return PriceCurve(
        size_bytes=(0, 1024), price_ticks=(latency_ticks, latency_ticks + ticks_per_kib)
    )


@dataclass
class ByHand:
    """Nodes in captured order; every method returns the rank of the node it adds."""

    prices: dict[str, PriceCurve] = field(default_factory=dict)
    """Kind -> price; free where missing."""
    copy_price: PriceCurve = FREE
    bucket_launch_ticks: int = 0
    names: list[str] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    storages: list[dict] = field(default_factory=list)
    storage_of: dict[int, int] = field(default_factory=dict)
    collectives: list[dict] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)

    def node(self, kind: NodeKind, name: str, ticks: int, args: tuple[int, ...]) -> int:
        self.names.append(name)
        self.kinds.append(kind)
        self.ticks.append(ticks)
        self.before.append(tuple(sorted(set(args))))
        node = len(self.names) - 1
        for arg in args:
            if arg in self.storage_of:
                self.storages[self.storage_of[arg]]["uses"].add(node)
        return node

    def allocate(self, node: int, size: int, *, birth: int, kept: bool = False) -> None:
        self.storage_of[node] = len(self.storages)
        self.storages.append(
            {"size_bytes": allocated_bytes(size), "birth": birth, "kept": kept, "uses": {node}}
        )

    def input(self, name: str, size: int, *, kept: bool = False) -> int:
        node = self.node(NodeKind.INPUT, name, 0, ())
        self.allocate(node, size, birth=-1, kept=kept)
        return node

    def view(self, name: str, arg: int, *sizes: int) -> int:
        """Add a view of ``arg``, whose size the nodes ``sizes`` have decided."""
        node = self.node(NodeKind.VIEW, name, 0, (arg,))
        self.before[node] = tuple(sorted({arg, *sizes}))
        self.storage_of[node] = self.storage_of[arg]
        return node

    def compute(self, name: str, ticks: int, *args: int, size: int = 0) -> int:
        node = self.node(NodeKind.COMPUTE, name, ticks, args)
        if size:
            self.allocate(node, size, birth=node)
        return node

    def start(
        self, kind: str, name: str, arg: int, input_bytes: int, output_bytes: int, **fields
    ) -> int:
        """Add a start node; ``fields`` are ``group``, ``launch_ticks`` and those of Collective."""
        group, launch_ticks = fields.pop("group", "dp"), fields.pop("launch_ticks", 0)
        node = self.node(NodeKind.START, name, launch_ticks, (arg,))
        self.allocate(node, output_bytes, birth=node)
        if (kind, group) not in self.keys:
            self.keys.append((kind, group))
        self.collectives.append(
            {
                "start": node,
                "key": self.keys.index((kind, group)),
                "size_bytes": output_bytes if kind == "all_gather" else input_bytes,
                "input_bytes": input_bytes,
                "output_bytes": output_bytes,
                "input_storage": self.storage_of[arg],
                "output_storage": self.storage_of[node],
                "holds_input": True,
                "on_path": False,
                "bucketable": True,
                "prologue": (),
                "epilogue": (),
                "module": "",
                **fields,
            }
        )
        return node

    def wait(self, name: str, start: int) -> int:
        c = next(c for c in self.collectives if c["start"] == start)
        c["wait"] = self.node(NodeKind.WAIT, name, 0, (start,))
        self.storage_of[c["wait"]] = self.storage_of[start]
        if c["holds_input"]:
            self.storages[c["input_storage"]]["uses"].add(c["wait"])
        return c["wait"]

    def output(self, *args: int) -> Problem:
        """Add the output and return the problem."""
        self.node(NodeKind.OUTPUT, "output", 0, args)
        groups = tuple(dict.fromkeys(group for _, group in self.keys))
        problem = Problem(
            name="by hand",
            graph_hash="",
            node_names=tuple(self.names),
            kinds=tuple(self.kinds),
            duration_ticks=tuple(self.ticks),
            predecessors=tuple(self.before),
            modules=("",) * len(self.names),
            storages=tuple(
                Storage(**(s | {"uses": tuple(sorted(s["uses"]))})) for s in self.storages
            ),
            keys=tuple(
                Key(
                    kind=kind,
                    group=group,
                    group_size=2,
                    reduce_op="" if kind == "all_gather" else "sum",
                    dtype="bf16",
                    device="cuda",
                    stream=groups.index(group),
                    price=self.prices.get(kind, FREE),
                    launch_ticks=self.bucket_launch_ticks,
                )
                for kind, group in self.keys
            ),
            collectives=tuple(Collective(**c) for c in self.collectives),
            streams=groups,
            copy_price=self.copy_price,
        )
        check_problem(problem)
        return problem


def schedule(problem: Problem, text: str, *buckets: str) -> Schedule:
    """Return the schedule that ``text`` spells: node names, and ``in:b start:b wait:b
    out:START_NODE`` for bucket b.

    A bucket is the names of its members' start nodes.
    """
    rank = {name: i for i, name in enumerate(problem.node_names)}
    kinds = {"in": StepKind.COPY_IN, "start": StepKind.START, "wait": StepKind.WAIT}
    steps = []
    for word in text.split():
        kind, _, of = word.partition(":")
        if not of:
            steps.append(Step(StepKind.NODE, rank[word]))
        elif kind == "out":
            steps.append(Step(StepKind.COPY_OUT, problem.collective_of_node[rank[of]]))
        else:
            steps.append(Step(kinds[kind], int(of)))
    members = tuple(
        Bucket(tuple(problem.collective_of_node[rank[name]] for name in bucket.split()))
        for bucket in buckets
    )
    return Schedule(buckets=members, steps=tuple(steps))


def a_view_of_a_size() -> Problem:
    """A node decides the size of a view of ``large``, and stands before ``large`` as captured."""
    hand = ByHand()
    x = hand.input("x", 512)
    item = hand.compute("item", 1, x, size=512)
    other = hand.compute("other", 1, item, size=8192)
    small = hand.compute("small", 1, other, size=512)
    large = hand.compute("large", 1, x, size=4096)
    view = hand.view("view", large, item)
    return hand.output(hand.compute("last", 1, view, small, size=512))
