"""The bytes of tensors that are alive at each line of the code that Inductor generates, read from
its allocations, reuses and deletions. Results of attention and other operators with several outputs
count where they are unpacked.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule

from apsched.units import allocated_bytes
from tests.helpers.graphs.inductor_code import generated_code

_NEW = re.compile(r"(\w+) = (?:empty_strided_\w+\(|torch\.ops\.(?!.*wait_tensor)|\w+\[)")
_SAME = re.compile(r"(\w+) = (?:reinterpret_tensor\((\w+),.*\)|(\w+))$")


def peak_of_code(module: GraphModule, kept: Collection[str], **settings: Any) -> int:
    """Return the most bytes that the code of a graph holds; the caller holds ``kept`` inputs."""
    sizes: dict[str, int] = {}
    inputs: list[str] = []
    original = GraphLowering.codegen

    def recorded(graph: GraphLowering) -> Any:
        code = original(graph)
        buffers = {**graph.name_to_buffer, **graph.graph_inputs}
        sizes.update((name, _size_bytes(buffer)) for name, buffer in buffers.items())
        inputs.extend(graph.graph_inputs)
        return code

    GraphLowering.codegen = recorded
    try:
        code = generated_code(module, **settings)
    finally:
        GraphLowering.codegen = original
    placeholders = module.graph.find_nodes(op="placeholder")
    held = {name for name, node in zip(inputs, placeholders, strict=True) if node.name in kept}
    return _peak(code, sizes, inputs, held)


def _size_bytes(buffer: Any) -> int:
    """Return the bytes that the buffer takes itself; 0 if it has no memory or is a part of
    another one.
    """
    layout = buffer.maybe_get_layout() if isinstance(buffer, ir.IRNode) else None
    if not isinstance(layout, ir.Layout) or isinstance(layout, ir.NonOwningLayout):
        return 0
    return allocated_bytes(int(layout.storage_size()) * layout.dtype.itemsize)


def _peak(
    code: str, sizes: Mapping[str, int], inputs: Collection[str], held: Collection[str]
) -> int:
    memory_of = {name: name for name in inputs}
    num_names = Counter([*inputs, *held])
    live = peak = sum(sizes[name] for name in inputs)
    statements = [
        statement.strip()
        for line in code[code.index("def call(") :].splitlines()
        for statement in line.split("  #")[0].split("; ")
    ]
    for statement in statements:
        if statement.startswith("return"):
            break
        if statement.startswith("del "):
            for name in statement.removeprefix("del ").split(", "):
                memory = memory_of.pop(name)
                num_names[memory] -= 1
                live -= 0 if num_names[memory] else sizes[memory]
        elif found := _NEW.match(statement):
            memory_of[found[1]] = found[1]
            num_names[found[1]] = 1
            live += sizes.get(found[1], 0)
        elif (found := _SAME.match(statement)) and (found[2] or found[3]) in memory_of:
            memory_of[found[1]] = memory_of[found[2] or found[3]]
            num_names[memory_of[found[1]]] += 1
        peak = max(peak, live)
    return peak
