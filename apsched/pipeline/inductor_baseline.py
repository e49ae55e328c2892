"""torch's own schedulers as baselines, run on a copy of the captured graph at the costs of our
model; they need neither CUDA nor triton.

``inductor``         ``schedule_overlap_bucketing`` (torch/_inductor/fx_passes/
                     overlap_scheduling.py): a greedy over the graph
``inductor_manual``  ``manual_overlap_bucketing`` (overlap_manual_scheduling.py): a bucket a
                     transformer block, one ahead

Settings are torch's defaults, except: collectives are bucketed (off by default); compute is not
benchmarked; ``control_deps`` are not inserted, since the order of the graph is the order of
execution here. FSDP collectives are first merged up to the size that torch's own table has for an
H100 (torch/_inductor/comm_analysis.py), whatever machine this is. ``inductor`` makes flat buckets
of ATen operators (``bucket_mode="default"``), ``inductor_manual`` uses torch's copy-in operators
(``custom_ops``): both as by default.
"""

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from apsched.capture.captured import CapturedGraph
from apsched.config import Caps
from apsched.costs.checked import checked
from apsched.costs.model import CostModel
from apsched.fx.collectives import (
    describe,
    group_sizes,
    is_collective,
    is_wait_tensor,
)
from apsched.fx.graph_copies import copied, copied_alone
from apsched.fx.subgraphs import with_all_inside
from apsched.graph.export.export import export_graph
from apsched.graph.export.whole_nodes import whole_us
from apsched.graph.records import priced_kind
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.result import Score
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.baselines import block_labels
from apsched.torch_compat import graphs as torch_private

logger = logging.getLogger(__name__)

INDUCTOR, INDUCTOR_MANUAL = "inductor", "inductor_manual"


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorRun:
    """The result of one of torch's schedulers on a graph."""

    name: str
    module: GraphModule
    """In its order and with its buckets."""
    seconds: float
    """Wall time of torch's pass alone."""
    cpu_seconds: float
    """Processor time of torch's pass alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchScores:
    """Figures of torch's schedulers on one graph."""

    scores: tuple[Score, ...]
    seconds: Mapping[str, float]
    """Wall time of each pass alone, by name."""
    notes: tuple[str, ...]
    """Why one is missing, a sentence each."""


def torch_scores(
    captured: CapturedGraph,
    problem: Problem,
    cost_model: CostModel,
    caps: Caps,
    *,
    group_ranks: Mapping[str, tuple[int, ...]],
) -> TorchScores:
    """Return the figures of both schedulers on ``captured``, whose problem is ``problem``; a failed
    scheduler becomes a note, not an error.
    """
    scores, seconds, notes = [], {}, []
    for name in (INDUCTOR, INDUCTOR_MANUAL):
        if name == INDUCTOR_MANUAL and not _blocks(problem):
            notes.append(
                f"{problem.name}: no {name}, which needs the module names of FSDP collectives"
            )
            continue
        try:
            by_costs = name == INDUCTOR
            run = (
                run_inductor(captured, cost_model, group_ranks=group_ranks)
                if by_costs
                else run_inductor_manual(captured, problem)
            )
            scores.append(
                score_run(run, captured, problem, cost_model, caps, group_ranks=group_ranks)
            )
            seconds[name] = run.seconds
        except Exception as error:  # a baseline that fails does not stop the comparison
            logger.debug("%s failed", name, exc_info=True)
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            failed = "apsched cannot price" if _is_ours(error) else "torch's scheduler fails on"
            notes.append(
                f"{problem.name}: no {name}, {failed} this graph ({type(error).__name__}: {reason})"
            )
    return TorchScores(scores=tuple(scores), seconds=seconds, notes=tuple(notes))


def _is_ours(error: BaseException) -> bool:
    """Whether ``error`` comes from a price or from reading torch's result, not torch's pass."""
    ours = {each.__code__ for each in (_PricesMs.__init__, _PricesMs.__call__, score_run)}
    return any(frame.f_code in ours for frame, _ in traceback.walk_tb(error.__traceback__))


def run_inductor(
    captured: CapturedGraph, cost_model: CostModel, *, group_ranks: Mapping[str, tuple[int, ...]]
) -> InductorRun:
    """Return the result of ``schedule_overlap_bucketing`` on a copy of ``captured`` at our costs.

    The process groups that the graph names must run (a fake one suffices).
    """
    module = copied(captured.module)
    prices_ms = _PricesMs(module, checked(cost_model), group_ranks)
    return _timed(INDUCTOR, module, lambda: torch_private.schedule_overlap(module, prices_ms))


def run_inductor_manual(captured: CapturedGraph, problem: Problem) -> InductorRun:
    """Return the result of ``manual_overlap_bucketing`` on a copy of ``captured``: a bucket for
    each transformer block and key.

    It uses no costs. Blocks are those of ``transformer_block``, read from the names of parameters.
    """
    module = copied(captured.module)
    blocks = _blocks(problem)
    plan: list[list[str] | str] = list(dict.fromkeys(blocks.values()))
    return _timed(
        INDUCTOR_MANUAL,
        module,
        lambda: torch_private.schedule_overlap_by_module(
            module, plan, lambda node: blocks.get(node.name, "")
        ),
    )


def score_run(
    run: InductorRun,
    captured: CapturedGraph,
    problem: Problem,
    cost_model: CostModel,
    caps: Caps,
    *,
    group_ranks: Mapping[str, tuple[int, ...]],
) -> Score:
    """Return the figures of the graph that torch made: exported, priced and simulated as the
    captured one was.
    """
    dag = export_graph(replace(captured, module=run.module), cost_model, group_ranks=group_ranks)
    found = with_contention(build_problem(dag), problem.contention)
    schedule = as_captured(found.num_nodes)
    timeline = simulate(found, schedule)
    return Score(
        name=run.name,
        step_time_ticks=timeline.step_time_ticks,
        exposed_ticks=timeline.exposed_ticks,
        peak_memory_bytes=timeline.peak_memory_bytes,
        num_launches=timeline.num_launches,
        violations=(
            *verify(found, schedule, caps),
            *_broken_bucket_caps(run.module, found, problem, caps),
        ),
    )


class _PricesMs:
    """The time of a node in milliseconds, in the form that torch calls.

    The nodes of the captured graph are priced ahead, so that their pricing is not timed. A compute
    node that torch adds is priced as a kernel of its own: torch asks for the price while the graph
    is half rewritten, so the other nodes of its kernel are not known.
    """

    def __init__(
        self, module: GraphModule, cost_model: CostModel, group_ranks: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._cost_model = cost_model
        self._sizes = group_sizes(with_all_inside(module.graph.nodes), group_ranks)
        self._nodes = frozenset(module.graph.nodes)
        self._known = {
            node: self._price(node, None) for node in self._nodes if node.op == "call_function"
        }

    def __call__(self, node: Node, size_bytes: int | None) -> float:
        if size_bytes is None and node in self._known:
            return self._known[node]
        return self._price(node, size_bytes)

    def _price(self, node: Node, size_bytes: int | None) -> float:
        if is_wait_tensor(node):
            return 0.0
        if not is_collective(node):
            priced = node if node in self._nodes else copied_alone(node)
            return whole_us(self._cost_model, priced, self._sizes) / 1000
        call = describe(node, self._sizes)
        priced_bytes = call.size_bytes if size_bytes is None else size_bytes
        return (
            self._cost_model.collective_us(
                priced_kind(call.kind), call.group, call.group_size, priced_bytes
            )
            / 1000
        )


def _blocks(problem: Problem) -> dict[str, str]:
    """Return the transformer block of every FSDP start whose module is known, by the name of the
    start.
    """
    labels = block_labels(problem)
    return {
        problem.node_names[c.start]: labels[c.module]
        for c in problem.collectives
        if not c.on_path and c.module
    }


def _timed(name: str, module: GraphModule, schedule: Callable[[], None]) -> InductorRun:
    torch_private.import_schedulers()  # not timed
    began, cpu_began = time.perf_counter(), time.process_time()
    schedule()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    module.graph.lint()
    module.recompile()
    return InductorRun(name=name, module=module, seconds=seconds, cpu_seconds=cpu_seconds)


def _broken_bucket_caps(
    module: GraphModule, found: Problem, problem: Problem, caps: Caps
) -> Iterator[str]:
    """Yield the buckets of torch that break the caps on bytes and span."""
    start_named = {problem.node_names[c.start]: c.start for c in problem.collectives}
    nodes = tuple(module.graph.nodes)
    for collective in found.collectives:
        node = nodes[collective.start]
        sources = {
            name for name, graph in torch_private.sources_of(node) if graph == id(module.graph)
        }
        members = sorted(start_named[name] for name in sources & start_named.keys())
        if len(members) < 2:
            continue
        if caps.bucket_cap_bytes is not None and collective.size_bytes > caps.bucket_cap_bytes:
            yield (
                f"{node.name} has {collective.size_bytes} bytes, more than the bucket cap of"
                f" {caps.bucket_cap_bytes}"
            )
        span = members[-1] - members[0]
        if caps.max_topo_span is not None and span > caps.max_topo_span:
            yield (
                f"{node.name} spans {span} ranks, more than the topo-span cap of"
                f" {caps.max_topo_span}"
            )
