"""Two gathers in a row, over the two axes of a mesh, as one gather over both."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node

from apsched.errors import InputError
from apsched.fx.collectives import argument, group_name, input_nodes, is_wait_tensor
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.layouts import is_part, moved_along
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.graphs import ordered_group

_c10d = torch.ops._c10d_functional
_GATHER = _c10d.all_gather_into_tensor.default


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMesh:
    """The groups of a mesh of two axes as this process rank sees them."""

    axes: tuple[str, str]
    """Names of the groups along each axis."""
    sizes: tuple[int, int]
    by_rows: str
    """Group of all process ranks of the mesh, the last axis counting fastest."""
    by_columns: str
    """The same, the first axis counting fastest."""

    @property
    def size(self) -> int:
        """Process ranks of the mesh."""
        return self.sizes[0] * self.sizes[1]


def flat_mesh(mesh: DeviceMesh) -> FlatMesh:
    """Return the groups of ``mesh``, which has two axes; the flat ones are made where there are
    none yet.

    Making a group is collective: every process rank of the mesh must call this, and call it in the
    same order among other such calls.
    """
    if mesh.ndim != 2:
        raise InputError(
            f"expected a mesh of two axes, found {mesh.ndim}; take the two that gathers are chained"
            " over, as mesh['dp', 'tp']"
        )
    ranks = [[int(rank) for rank in row] for row in mesh.mesh.tolist()]
    rows, columns = (
        [rank for line in lines for rank in line] for lines in (ranks, zip(*ranks, strict=True))
    )
    try:
        by_rows, by_columns = ordered_group(rows), ordered_group(columns)
    except RuntimeError as error:
        raise InputError(
            f"expected a process group in the order {columns}, found that {error}"
        ) from None
    return FlatMesh(
        axes=(mesh.get_group(0).group_name, mesh.get_group(1).group_name),
        sizes=(mesh.size(0), mesh.size(1)),
        by_rows=by_rows,
        by_columns=by_columns,
    )


def fuse_chained_gathers(mesh: FlatMesh) -> Pass:
    """Return the pass that makes one gather of each pair of gathers over the two axes of ``mesh``
    (AutoParallel #472).

    A gather stacks what it gets from its group along dim 0. The first gather of a pair, over axis
    a, gives each process rank (i, j) its group's shards in the order of a; the second stacks those
    in the order of the other axis b. So shard (i, j) ends in place j_b * |a| + i_a: the order of
    the mesh in which a counts fastest. The fused gather runs on the group whose process ranks stand
    in that order: rows where the second axis is gathered first, columns where the first is.

    Left alone is a pair where a value between the two has another user, where what lies between
    moves any element (permutes that do not cancel) or casts, and where the groups are not the axes
    of the mesh.
    """

    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        for node in list(result.graph.nodes):
            if (pair := _pair(node, mesh)) is not None:
                _fuse(*pair, mesh.size)
        return finished(result)

    return Pass(name="fuse_chained_gathers", run=run)


def _pair(second: Node, mesh: FlatMesh) -> tuple[Node, Node, Node, str] | None:
    """Return first gather, second gather, its wait, and the group of the fused one."""
    if second.target is not _GATHER:
        return None
    waits = list(second.users)
    chain: list[Node] = []
    node = input_nodes(second)[0]
    while not is_wait_tensor(node) and len(node.users) == 1 and len(node.all_input_nodes) == 1:
        chain.insert(0, node)
        node = node.all_input_nodes[0]
    if (
        not is_wait_tensor(node)
        or len(node.users) != 1
        or len(waits) != 1
        or not is_wait_tensor(waits[0])
    ):
        return None
    first = node.all_input_nodes[0]
    groups = (
        (group_name(first), group_name(second))
        if first.target is _GATHER and tuple(first.users) == (node,)
        else None
    )
    if groups is None or groups not in (mesh.axes, mesh.axes[::-1]):
        return None
    if argument(first, "group_size", 0) * argument(second, "group_size", 0) != mesh.size:
        return None
    gathered = node.meta["val"]
    if not is_part(moved_along(gathered, chain, node), gathered.shape, 0):
        return None
    return first, second, waits[0], mesh.by_columns if groups == mesh.axes else mesh.by_rows


def _fuse(first: Node, second: Node, wait: Node, group: str, size: int) -> None:
    graph = second.graph
    with graph.inserting_before(second):
        start = _call(graph, _GATHER, (input_nodes(first)[0], size, group), second)
        result = _call(graph, _c10d.wait_tensor.default, (start,), wait)
    wait.replace_all_uses_with(result)


def _call(graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node
