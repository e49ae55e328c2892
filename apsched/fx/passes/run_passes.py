"""The one loop that runs passes: names, times, checks and logs each, and shows its changes on
request.
"""

import difflib
import logging
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from apsched.errors import InputError
from apsched.fx.collectives import is_collective, is_wait_tensor
from apsched.fx.effects.of_node import effects_of
from apsched.fx.passes.spec import check_graph
from apsched.progress import working_on

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass: a function from graph module to graph module that leaves its input unchanged."""

    name: str
    run: Callable[[GraphModule], GraphModule]
    spec: Callable[[GraphModule], None] | None = None
    """Raises InputError where a graph is not as the pass leaves it; ``None`` where there is nothing
    beyond :func:`check_graph`.
    """


PassList = tuple[Pass, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """The record of one pass."""

    name: str
    seconds: float
    num_nodes: tuple[int, int]
    """Before and after."""
    num_collectives: tuple[int, int]
    """Before and after."""
    diff: str
    """Unified diff of the graphs, node by node with their tags; empty without ``diff``, or if
    nothing changed.
    """

    def __str__(self) -> str:
        nodes, collectives = (
            f"{before} -> {after}" for before, after in (self.num_nodes, self.num_collectives)
        )
        return (
            f"pass {self.name}: {self.seconds * 1000:.1f} ms, nodes {nodes}, collectives"
            f" {collectives}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """The module that a pass list made, and a record of each pass."""

    module: GraphModule
    records: tuple[PassRecord, ...]


def run_passes(
    module: GraphModule, passes: Iterable[Pass], *, check: bool = True, diff: bool = False
) -> PassRun:
    """Return the result of ``passes`` on ``module``, one after the other; ``module`` stays
    unchanged.

    With ``check`` each result must be a graph that the rest can use (``lint`` and
    :func:`apsched.fx.passes.spec.check_graph`), must be called as before (inputs and outputs), keep
    the spec of its pass, and the pass must not have changed its input.

    Raises
    ------
    InputError
        for the first pass that breaks this, by name.
    """
    passes = tuple(passes)
    if repeated := [p.name for k, p in enumerate(passes) if p.name in {q.name for q in passes[:k]}]:
        raise InputError(
            f"a pass list names each pass once; found {repeated[0]} twice: drop one of them"
        )
    records = []
    for one in passes:
        working_on(f"pass {one.name} over {len(module.graph.nodes)} nodes", is_long=True)
        before = graph_lines(module.graph) if check or diff else []
        began = time.perf_counter()
        result = one.run(module)
        seconds = time.perf_counter() - began
        if check:
            _check(one, module, before, result)
        records.append(
            PassRecord(
                name=one.name,
                seconds=seconds,
                num_nodes=(len(module.graph.nodes), len(result.graph.nodes)),
                num_collectives=(_num_collectives(module), _num_collectives(result)),
                diff=_diff(one.name, before, graph_lines(result.graph)) if diff else "",
            )
        )
        logger.info("%s", records[-1])
        module = result
    return PassRun(module=module, records=tuple(records))


def graph_lines(graph: torch.fx.Graph) -> list[str]:
    """Return one line for each node: its target and arguments, and the tags that passes and
    partitioners read.
    """
    return [_line(node) for node in graph.nodes]


def _line(node: Node) -> str:
    arguments = ", ".join(
        [*(str(a) for a in node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    )
    tags = {str(key): value for key, value in node.meta.get("custom", {}).items()}
    if "recompute" in node.meta:
        tags["recompute"] = node.meta["recompute"]
    shown = ", ".join(f"{key}={tags[key]}" for key in sorted(tags))
    return f"{node.name} = {node.op} {node.target}({arguments})" + (f"  # {shown}" if shown else "")


def _check(one: Pass, module: GraphModule, before: Sequence[str], result: GraphModule) -> None:
    if graph_lines(module.graph) != before:
        raise InputError(
            f"pass {one.name}: expected its input to stay as it is, found it changed; change a copy"
            " (apsched.fx.graph_copies)"
        )
    try:
        check_graph(result)
        if one.spec is not None:
            one.spec(result)
    except InputError as error:
        raise InputError(f"pass {one.name}: {error}") from None
    if lost := _unwaited(result) - _unwaited(module):
        raise InputError(
            f"pass {one.name}: node {min(lost)}: expected a wait_tensor of the collective, as"
            " before, found none; its result is never ready"
        )
    for what, own, theirs in zip(
        ("inputs", "outputs"), _convention(module.graph), _convention(result.graph), strict=True
    ):
        if own != theirs:
            raise InputError(
                f"pass {one.name}: expected a graph that is called as before, with {what}"
                f" {', '.join(own)}, found {', '.join(theirs)}; a pass changes only nodes between"
                " inputs and outputs"
            )


def _convention(graph: torch.fx.Graph) -> tuple[list[str], list[str]]:
    """Return the interface for a caller: names of inputs, types and shapes of outputs."""
    values = tree_leaves(graph.output_node().args[0], is_leaf=lambda item: item is None)
    seen = [value.meta.get("val") if isinstance(value, Node) else value for value in values]
    outputs = [
        f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
        for value in seen
    ]
    return [str(node.target) for node in graph.find_nodes(op="placeholder")], outputs


def _unwaited(module: GraphModule) -> set[str]:
    """Return the starts of ``module`` whose result, or an item of it, or a tensor that they write,
    no wait takes.
    """
    return {
        node.name
        for node in module.graph.nodes
        if is_collective(node)
        and not any(is_wait_tensor(user) for result in _results(node) for user in result.users)
    }


def _results(start: Node) -> list[Node]:
    written = tree_leaves(effects_of(start).writes)
    items = [user for user in start.users if user.target is operator.getitem]
    return [start, *items, *(node for node in written if isinstance(node, Node))]


def _num_collectives(module: GraphModule) -> int:
    return sum(is_collective(node) for node in module.graph.nodes)


def _diff(name: str, before: Sequence[str], after: Sequence[str]) -> str:
    return "\n".join(
        difflib.unified_diff(before, after, f"before {name}", f"after {name}", n=1, lineterm="")
    )
