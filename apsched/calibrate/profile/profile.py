"""Traces of a job and its graphs -> measured costs, and the operators without a match, with their
share of time. No torch here.

A cost is the mean over the steps whose time lies in the middle half: a sum of means is the mean of
the sum, so the costs of a step add up to the time of a step, while a disturbed step does not count.
Steps of all process ranks count alike.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import networkx as nx

from apsched.calibrate.profile.device_times import device_times, op_of_external_id
from apsched.calibrate.profile.host_times import host_times
from apsched.calibrate.profile.match import Matched, Place, match_step, places_of, view_operators
from apsched.calibrate.profile.messages import gloo_transfers
from apsched.calibrate.profile.trace import Trace
from apsched.costs.clusters.cluster import Cluster
from apsched.costs.measured import MeasuredCosts, Price, Transfers, fitted_bytes_per_us, rising
from apsched.costs.network.alpha_beta import group_shape
from apsched.errors import InputError
from apsched.graph.records import priced_kind
from apsched.kinds import PRICED_KINDS, CollectiveKind, NodeKind

SOURCE = "profile"
_Message = tuple[CollectiveKind, int, int, int]
"""Kind, ranks, nodes, bytes."""
_Shapes = Mapping[str, tuple[int, int]]
"""Group -> ranks, nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """Work in the trace that no node of the graphs did."""

    name: str
    share: float
    """Of the time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The result of reading a profile."""

    costs: MeasuredCosts
    num_steps: int
    """Of all traces."""
    num_used: int
    """Steps in the middle half, which the costs are made of."""
    step_us: float
    """A step: from the first node of each graph to its last, graphs added up; on a GPU from the
    first kernel to the last.
    """
    compute_us: float
    """Of it, work on the compute stream, launches included."""
    transfer_us: Mapping[str, float]
    """By group, transfers on its stream, waits for late process ranks included."""
    num_nodes: int
    """Nodes that take time, or start collectives."""
    num_matched: int
    missing: tuple[tuple[str, int], ...]
    """Operations of nodes that no step has, and how many nodes."""
    unmatched: tuple[Unmatched, ...]
    """The largest first."""
    other_collectives: tuple[tuple[str, int, int], ...]
    """Kinds of which no step has as many collectives as the graphs, with the number in a step and
    in the graphs.
    """
    late_share: float | None
    """Share of the time of transfers that waits for late process ranks: the time of a transfer
    beyond that of the last process rank of its group. ``None`` where there are not as many steps of
    several process ranks.
    """
    idle_us: float | None = None
    """Of a step, the time in which no kernel runs on the device; ``None`` on a CPU."""


@dataclass(slots=True)
class _Step:
    """One step of one trace."""

    on_host: bool
    """The host is the compute stream, and launching takes its time."""
    duration_us: float
    compute: dict[Place, float] = field(default_factory=dict)
    transfers: dict[Place, float] = field(default_factory=dict)
    messages: list[tuple[_Message, float]] = field(default_factory=list)
    other_us: dict[str, float] = field(default_factory=dict)
    idle_us: float | None = None


def profile_costs(
    dags: Sequence[nx.DiGraph],
    traces: Sequence[Trace],
    cluster: Cluster,
    cluster_name: str,
    sizes: Mapping[str, int] | None = None,
) -> Profile:
    """Return the costs of the nodes of ``dags`` from ``traces``, one a process rank; ``cluster``
    gives the ranks of a node, ``sizes`` the assumed sizes that depend on data.

    Raises ``InputError`` where nothing of the graphs is in a trace, or traces come from different
    devices or have the same steps.
    """
    _check_steps(traces)
    devices = {trace.device for trace in traces}
    if len(devices) != 1:
        raise InputError(
            "traces must come from one kind of device; found"
            f" {', '.join(sorted(devices)) or 'no trace'}"
        )
    places, views = places_of(dags), view_operators(dags)
    shapes = _group_shapes(dags, cluster)
    used: list[_Step] = []
    taken_apart: list[list[_Step]] = []
    for trace in traces:
        ids = op_of_external_id(trace) if trace.on_gpu else {}
        steps = [
            _taken_apart(trace, match_step(places, views, trace, step), step, ids, shapes, cluster)
            for step in trace.steps
        ]
        steps = [step for step in steps if step.compute]
        if not steps:
            raise InputError(
                f"{trace.path}: none of the {len(places)} nodes of the graph is in it; is it a"
                " trace of this model, with these sizes and this mesh? (an Inductor job shows its"
                " matrix products only: profile it with backend aot_eager)"
            )
        taken_apart.append(steps)
        used += _middle_half(steps)
    step_us = fmean(step.duration_us for step in used)
    timed = [place for place in places if place.record.kind is not NodeKind.WAIT]
    seen = {place for step in used for place in (*step.compute, *step.transfers)}
    messages = {message for step in used for message, _ in step.messages}
    seen.update(
        place
        for place in timed
        if place.record.kind is NodeKind.START and _message(place, shapes) in messages
    )
    idle = [step.idle_us for step in used if step.idle_us is not None]
    return Profile(
        costs=replace(
            _costs(used, device=devices.pop(), cluster_name=cluster_name), sizes=dict(sizes or {})
        ),
        num_steps=sum(map(len, taken_apart)),
        num_used=len(used),
        step_us=step_us,
        compute_us=fmean(sum(step.compute.values()) for step in used),
        transfer_us=_transfer_us(used),
        num_nodes=len(timed),
        num_matched=len(seen.intersection(timed)),
        missing=_missing([place for place in timed if place not in seen]),
        unmatched=_unmatched(used, step_us),
        other_collectives=_other_collectives(used, places, shapes),
        late_share=_late_share(taken_apart),
        idle_us=fmean(idle) if idle else None,
    )


def _check_steps(traces: Sequence[Trace]) -> None:
    """Refuse the same file twice, or the same steps of one process rank in two files: they would
    count twice. Traces of other steps of a rank are welcome.
    """
    seen: dict[object, str] = {}
    for trace in traces:
        is_named = trace.rank is not None
        same = (trace.rank, trace.steps) if is_named else Path(trace.path).resolve()
        if same in seen:
            steps = f"the same steps of process rank {trace.rank} twice"
            raise InputError(
                f"--trace: expected other steps, or another process rank, in each trace; found"
                f" {steps if is_named else 'the same file'}: {seen[same]} and {trace.path}; leave"
                " one out"
            )
        seen[same] = trace.path


def _other_collectives(
    steps: Sequence[_Step], places: Sequence[Place], shapes: _Shapes
) -> tuple[tuple[str, int, int], ...]:
    expected = Counter(
        _message(place, shapes)[0] for place in places if place.record.kind is NodeKind.START
    )
    found = [Counter(message[0] for message, _ in step.messages) for step in steps]
    kinds = sorted({*expected, *(kind for counts in found for kind in counts)})
    return tuple(
        (kind, found[0][kind], expected[kind])
        for kind in kinds
        if all(counts[kind] != expected[kind] for counts in found)
    )


def _group_shapes(dags: Sequence[nx.DiGraph], cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Return ranks and nodes of every group that the graphs name."""
    shapes = {}
    for dag in dags:
        for rank in range(dag.number_of_nodes()):
            collective = dag.nodes[rank]["record"].collective
            if collective is not None and collective.group not in shapes:
                shape = group_shape(
                    cluster, dag.graph["group_ranks"].get(collective.group) or collective.group_size
                )
                shapes[collective.group] = (shape.num_ranks, shape.num_nodes)
    return shapes


def _taken_apart(
    trace: Trace,
    matched: Matched,
    step: tuple[float, float],
    ids: Mapping[int, int],
    shapes: _Shapes,
    cluster: Cluster,
) -> _Step:
    if trace.on_gpu:
        return _device_step(trace, matched, step, ids, shapes, cluster)
    starts = [pair.op for pair in matched.pairs if pair.place.record.kind is NodeKind.START]
    times = host_times(trace, matched, gloo_transfers(trace, starts))
    found = _Step(on_host=True, duration_us=sum(times.graph_us.values()))
    found.compute = {matched.pairs[k].place: time_us for k, time_us in times.compute_us.items()}
    found.transfers = {matched.pairs[k].place: time_us for k, time_us in times.transfer_us.items()}
    found.messages = [
        (_message(place, shapes), time_us) for place, time_us in found.transfers.items()
    ]
    spans = _graph_spans(trace, matched)
    for index in matched.unmatched:
        op = trace.ops[index]
        if any(begin <= op.begin_us <= end for begin, end in spans):
            found.other_us[op.name] = found.other_us.get(op.name, 0.0) + op.end_us - op.begin_us
    return found


def _device_step(
    trace: Trace,
    matched: Matched,
    step: tuple[float, float],
    ids: Mapping[int, int],
    shapes: _Shapes,
    cluster: Cluster,
) -> _Step:
    times = device_times(trace, matched, step, ids)
    found = _Step(
        on_host=False,
        duration_us=times.span_us,
        other_us=times.other_us,
        idle_us=times.idle_us,
    )
    for k, pair in enumerate(matched.pairs):
        record = pair.place.record
        # what a launch takes on a GPU's stream is no kernel: a start node has a price of its own
        # only where it copies first
        if record.kind is NodeKind.COMPUTE or (
            record.kind is NodeKind.START and times.compute_us[k] > 0
        ):
            found.compute[pair.place] = times.compute_us[k] + (
                cluster.launch_us if record.kind is NodeKind.START else 0.0
            )
    found.transfers = {matched.pairs[k].place: time_us for k, time_us in times.transfer_us.items()}
    for message, time_us in times.messages:
        shape = group_shape(cluster, message.ranks)
        found.messages.append(
            ((message.kind, shape.num_ranks, shape.num_nodes, message.size_bytes), time_us)
        )
    if not times.messages:  # no metadata: what the graph says of the nodes that were matched
        found.messages = [
            (_message(place, shapes), time_us) for place, time_us in found.transfers.items()
        ]
    return found


def _message(place: Place, shapes: _Shapes) -> _Message:
    collective = place.record.collective
    assert collective is not None
    return (priced_kind(collective.kind), *shapes[collective.group], collective.size_bytes)


def _graph_spans(trace: Trace, matched: Matched) -> list[tuple[float, float]]:
    spans: dict[int, tuple[float, float]] = {}
    for pair in matched.pairs:
        op = trace.ops[pair.op]
        begin, _ = spans.get(pair.place.graph, (op.begin_us, 0.0))
        spans[pair.place.graph] = (begin, op.end_us)
    return list(spans.values())


def _middle_half(steps: Sequence[_Step]) -> list[_Step]:
    """Return the steps without the quarter that is fastest and the one that is slowest."""
    ordered = sorted(steps, key=lambda step: step.duration_us)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def _costs(steps: Sequence[_Step], *, device: str, cluster_name: str) -> MeasuredCosts:
    by_operation: dict[str, list[float]] = {}
    launches: dict[CollectiveKind, list[float]] = {}
    transfers: dict[_Message, list[float]] = {}
    for step in steps:
        for place, time_us in step.compute.items():
            by_operation.setdefault(place.record.operation, []).append(time_us)
            if place.record.collective is not None and step.on_host:
                launches.setdefault(priced_kind(place.record.collective.kind), []).append(time_us)
        for message, time_us in step.messages:
            transfers.setdefault(message, []).append(time_us)
    return MeasuredCosts(
        device=device,
        cluster=cluster_name,
        compute={
            operation: Price(time_us=fmean(times), source=SOURCE)
            for operation, times in sorted(by_operation.items())
        },
        transfers=_transfers(transfers),
        launch_us={
            kind: fmean(times) for kind, times in sorted(launches.items()) if kind in PRICED_KINDS
        },
    )


def _transfers(times: Mapping[_Message, Sequence[float]]) -> tuple[Transfers, ...]:
    by_shape: dict[tuple[CollectiveKind, int, int], dict[int, Sequence[float]]] = {}
    for (kind, num_ranks, num_nodes, size_bytes), of_message in times.items():
        if size_bytes > 0 and sum(of_message) > 0 and kind in PRICED_KINDS:
            by_shape.setdefault((kind, num_ranks, num_nodes), {})[size_bytes] = of_message
    found = []
    for (kind, num_ranks, num_nodes), of_size in sorted(by_shape.items()):
        sizes = sorted(of_size)
        points = rising(
            [(size, fmean(of_size[size])) for size in sizes], [len(of_size[size]) for size in sizes]
        )
        slope = fitted_bytes_per_us(points)
        found.append(
            Transfers(
                kind=kind,
                num_ranks=num_ranks,
                num_nodes=num_nodes,
                source=SOURCE,
                points=points,
                bytes_per_us=slope,
            )
        )
    return tuple(found)


def _transfer_us(steps: Sequence[_Step]) -> dict[str, float]:
    groups = sorted({_group(place) for step in steps for place in step.transfers})
    return {
        group: fmean(
            sum(t for place, t in step.transfers.items() if _group(place) == group)
            for step in steps
        )
        for group in groups
    }


def _group(place: Place) -> str:
    collective = place.record.collective
    assert collective is not None
    return collective.group


def _late_share(steps: Sequence[Sequence[_Step]]) -> float | None:
    """Return how much of the time of transfers is not that of the shortest of the same transfer;
    steps are the same by their number.
    """
    if len(steps) < 2 or len({len(of_rank) for of_rank in steps}) != 1:
        return None
    total = shortest = 0.0
    for same in zip(*steps, strict=True):
        for place in set(same[0].transfers).intersection(*(step.transfers for step in same[1:])):
            times = [step.transfers[place] for step in same]
            total += fmean(times)
            shortest += min(times)
    return 1 - shortest / total if total else None


def _missing(places: Sequence[Place]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for place in places:
        counts[place.record.operation] = counts.get(place.record.operation, 0) + 1
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _unmatched(steps: Sequence[_Step], step_us: float) -> tuple[Unmatched, ...]:
    totals: dict[str, float] = {}
    for step in steps:
        for name, time_us in step.other_us.items():
            totals[name] = totals.get(name, 0.0) + time_us / len(steps)
    found = [
        Unmatched(name=name, share=time_us / step_us if step_us else 0.0)
        for name, time_us in totals.items()
    ]
    return tuple(sorted(found, key=lambda entry: (-entry.share, entry.name)))
