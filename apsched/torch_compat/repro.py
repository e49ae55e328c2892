"""Private functions of torch that write a graph as a program of its own, and the meaning of its
texts of graphs; each with the torch file it comes from.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apsched.names import base_of_node_group, first_name, is_second
from apsched.torch_compat.version import check_torch_version

check_torch_version()


def dtype_abbreviations() -> dict[str, torch.dtype]:
    """Return the types by the short names that torch prints: ``f32``, ``bf16``
    (torch/utils/_dtype_abbrs.py, dtype_abbrs).
    """
    from torch.utils._dtype_abbrs import dtype_abbrs

    return {short: dtype for dtype, short in dtype_abbrs.items()}


def graph_as_repro(module: Any) -> str:
    """Return ``module`` as torch's own stand-alone file: ``class Repro`` and ``load_args``
    (torch/_dynamo/repro/after_aot.py).

    Run as a program it executes the graph node by node, rather than compile it: Inductor would
    change the order.
    """
    from torch._dynamo.repro.after_aot import save_graph_repro

    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    text = io.StringIO()
    with _later_groups_resolved(module):  # torch writes the size of every group into the file
        save_graph_repro(text, module, inputs, "apsched", stable_output=True, command="get_args")
    runnable = re.sub(
        r"        run_repro\((.*)\)\n(?:        #.*\n?)+",
        r"        mod, args = run_repro(\1)\n        mod(*args)\n",
        text.getvalue(),
    )
    return runnable.replace(
        "    from torch._dynamo.repro.after_aot import setup_fake_process_groups\n",
        _SETUP_FAKE_PROCESS_GROUPS,
    )


@contextmanager
def _later_groups_resolved(module: Any) -> Iterator[None]:
    """Run the body with each process group of ``module`` that is not made yet known by its name.

    For a second group stands the group that it doubles, for the ranks of a node a group of their
    number (torch/csrc/distributed/c10d/GroupRegistry.cpp).
    """
    from torch._C import _distributed_c10d as c10d

    added: list[Any] = []
    try:
        for name, size in sorted(_later_groups(module).items()):
            c10d._register_process_group(name, _group_like(name, size))  # type: ignore[arg-type]
            added.append(name)
        yield
    finally:
        for name in added:
            c10d._unregister_process_group(name)


def _later_groups(module: Any) -> dict[str, int]:
    """Return name -> size of the groups of ``module`` that are not made yet: of all-gathers, whose
    arguments are a tensor (or several), the size of the group and its name.
    """
    return {
        node.args[2]: node.args[1]
        for node in module.graph.nodes
        if len(node.args) > 2
        and isinstance(node.args[2], str)
        and (is_second(node.args[2]) or base_of_node_group(node.args[2]) is not None)
    }


def _group_like(name: str, size: int) -> Any:
    from torch.distributed import distributed_c10d

    if is_second(name):
        first: Any = first_name(name)
        return distributed_c10d._resolve_process_group(first)  # type: ignore[attr-defined]
    return distributed_c10d.new_group(list(range(size)))


_SETUP_FAKE_PROCESS_GROUPS = """\
    # torch's own fails where a name is one that new_group chooses by itself
    def setup_fake_process_groups(groups):
        sizes = {group["size"] for group in groups.values()}
        dist.init_process_group(backend="fake", rank=0, world_size=max(sizes), store=FakeStore())
        made = {size: dist.new_group(list(range(size))) for size in sizes}
        torch._C._distributed_c10d._unregister_all_process_groups()
        for name, group in groups.items():
            torch._C._distributed_c10d._register_process_group(name, made[group["size"]])

"""
