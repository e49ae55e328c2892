"""A graph as the store of a study has it."""

from apsched.study.rows import GraphRow

GRAPH = GraphRow(
    graph_id="g",
    name="backward",
    graph_hash="h",
    cluster="h100",
    described={},
    num_nodes=1,
    num_collectives=0,
    device_memory_bytes=None,
    notes=(),
    file="graphs/g.graph",
)
