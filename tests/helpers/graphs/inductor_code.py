"""What full Inductor makes of a graph: generated code, read for the order of launches, waits and
kernels. Nothing is compiled or run.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.fx.collectives import collective_kind, is_wait_tensor

_CALL = re.compile(
    r"torch\.ops\._c10d_functional\.(?P<collective>\w+?)(_into_tensor|_tensor|_single|_)?(_coalesced)?(_out)?\.default\("
    r"|extern_kernels\.(?P<product>\w+)\(|torch\.ops\.aten\.(?P<attention>_scaled_dot_product\w+)\.default\(|(?P<kernel>cpp_fused\w*)\("
)
_PRODUCTS = {
    "mm": "mm",
    "bmm": "bmm",
    "addmm": "mm",
    "baddbmm": "bmm",
}  # Inductor adds while it multiplies, or does not


class _GeneratedError(Exception):
    """Carries the code out of Inductor before it is compiled."""


def decomposed(module: GraphModule) -> GraphModule:
    """Return a captured graph in the operators that Inductor lowers, traced on its own fake
    tensors, without what nobody uses.
    """
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with values[0].fake_mode, torch.no_grad():
        traced = make_fx(module, decomposition_table=select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def generated_code(module: GraphModule, **settings: object) -> str:
    """Return the python code that Inductor generates for a graph."""

    def stop(graph: GraphLowering) -> None:
        raise _GeneratedError(graph.codegen()[0].value)

    original = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = stop
    try:
        with config.patch(fx_graph_cache=False, **settings), torch.no_grad():
            compile_fx_inner(
                module, [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
            )
    except Exception as error:
        found = error
        while found is not None and not isinstance(found, _GeneratedError):
            found = found.__cause__ or found.__context__ or getattr(found, "inner_exception", None)
        if found is None:
            raise
        return str(found)
    finally:
        GraphLowering.compile_to_module = original
    raise AssertionError("Inductor generated no code")


@contextmanager
def interpreted() -> Iterator[list[str]]:
    """Have Inductor generate code, which is listed, but compile none: graphs are interpreted, which
    needs no C++ compiler.
    """
    codes = []

    def interpret(graph: GraphLowering) -> SimpleNamespace:
        codes.append(graph.codegen()[0].value)
        module = graph.orig_gm
        return SimpleNamespace(
            call=lambda arguments: Interpreter(module).run(*arguments), __file__=""
        )

    original = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = interpret
    try:
        with (
            config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield codes
    finally:
        GraphLowering.compile_to_module = original


def calls_of(code: str) -> list[str]:
    """Return what the code calls, in order: kinds of collectives, ``wait``, names of products and
    attentions, and ``kernel``.
    """
    calls = []
    for line in code[code.index("def call(") :].splitlines():
        if (found := _CALL.search(line)) and "assert_" not in line:
            name = found["collective"] or found["product"] or found["attention"] or "kernel"
            calls.append(_PRODUCTS.get(name, name))
    return calls


def calls_of_graph(module: GraphModule) -> list[str]:
    """Return the same of a graph, but for kernels: what becomes one is Inductor's choice."""
    calls = []
    for node in module.graph.nodes:
        if is_wait_tensor(node):
            calls.append("wait")
        elif (kind := collective_kind(node)) is not None:
            calls.append(kind)
        elif node.op == "call_function":
            name = getattr(node.target, "_opname", "")
            if name in _PRODUCTS or name.startswith("_scaled_dot_product"):
                calls.append(_PRODUCTS.get(name, name))
    return calls


EVENTS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "wait")


def segments_of(calls: list[str]) -> list[tuple[str, dict[str, int]]]:
    """Return every launch and wait, with what is called between the one before it and it; the end
    comes last.
    """
    segments, here = [], Counter()
    for call in [*calls, "end"]:
        if call in (*EVENTS, "end"):
            segments.append((call, dict(here)))
            here = Counter()
        elif call != "kernel":
            here[call] += 1
    return segments


_LAUNCH = re.compile(
    r"(?:(?P<result>buf\d+) = )?torch\.ops\._c10d_functional\.(?!wait_tensor)\w+\.default\("
    r"(?:reinterpret_tensor\()?(?P<sent>\w+),.*?(?:out=(?P<out>buf\d+))?\)$"
)
_COALESCED = re.compile(
    r"(buf\d+) = torch\.ops\._c10d_functional\.\w+_coalesced\.default\(\[(.*)\],"
)


def freed_in_flight(code: str) -> tuple[int, list[str]]:
    """Return how many transfers read a buffer, and the lines that free or reuse a buffer in flight
    before the wait.
    """
    lines = code[code.index("def call(") :].splitlines()
    num_transfers, wrong = 0, []
    for k, line in enumerate(lines):
        for result, sent in _transfers(line.strip(), lines[k + 1 :]):
            num_transfers += 1
            wait = re.compile(rf"wait_tensor\.default\((reinterpret_tensor\()?{result}\b")
            waited = next(j for j in range(k, len(lines)) if wait.search(lines[j]))
            wrong += [
                other
                for other in lines[k + 1 : waited]
                if re.search(rf"(del|=) ({sent}|{result})\b", other)
            ]
    return num_transfers, wrong


def _transfers(line: str, later: list[str]) -> list[tuple[str, str]]:
    """Return result and buffer sent of each transfer that ``line`` launches."""
    if (found := _COALESCED.search(line)) is not None:
        launched, sent = found.groups()
        arguments = re.findall(r"\b(?:buf|arg)\d+(?:_\d+)?", sent)
        parts = {
            name: f"= {launched}[{i}]" for i, name in enumerate(arguments) if name.startswith("buf")
        }
        return [
            (next(other.split()[0] for other in later if other.endswith(part)), name)
            for name, part in parts.items()
        ]
    if (found := _LAUNCH.search(line)) is not None:
        return [(found["result"] or found["out"] or found["sent"], found["sent"])]
    return []
