"""What a device holds beside a graph: parameters of other graphs, optimizer, communicators, context
and reserve; nothing twice.
"""

from dataclasses import replace

import networkx as nx
import pytest

from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.graph.records import NodeRecord, StorageRecord
from apsched.kinds import NodeKind
from apsched.pipeline.device_memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    MemoryAccount,
    beside_graph,
    beside_graphs,
)

H100 = load_cluster("h100")


def _dag(*inputs: tuple[str, str, int, bool], gradients: tuple[str, ...] = ()) -> nx.DiGraph:
    """Return a graph of inputs: name of the parameter, dtype, bytes, kept; ``gradients`` are the
    parameters whose gradients it returns.
    """
    dag = nx.DiGraph(gradients=gradients)
    dag.graph["storages"] = tuple(
        StorageRecord(size_bytes=size, kept=kept) for _, _, size, kept in inputs
    )
    for rank, (name, dtype, _, _) in enumerate(inputs):
        record = NodeRecord(
            name=f"primals_{rank}",
            rank=rank,
            op="placeholder",
            target=f"primals_{rank}",
            kind=NodeKind.INPUT,
            duration_us=0.0,
            cost_source="free",
            allocates=(rank,),
            reads=(),
            writes=(),
            aliases=(),
            frees=(),
            module=name,
            direction="forward",
            dtype=dtype,
            role="",
            signature="",
            collective=None,
        )
        dag.add_node(rank, record=record)
    return dag


FORWARD = _dag(
    ("embedding", "float32", 400, True),
    ("layer", "float32", 800, True),
    ("", "bfloat16", 64, True),  # a buffer
    ("", "int64", 32, True),  # tokens
)
BACKWARD = _dag(("layer", "float32", 800, True), ("layer.out", "bfloat16", 5000, False))


def test_a_parameter_of_two_graphs_counts_once_and_one_of_the_other_graph_counts_here() -> None:
    forward, backward = beside_graphs([FORWARD, BACKWARD], H100)
    assert (forward.parameter_bytes, forward.other_parameter_bytes) == (1200, 0)
    assert (backward.parameter_bytes, backward.other_parameter_bytes) == (1200, 400)
    assert forward.bf16_parameter_bytes == 600


@pytest.mark.parametrize(
    ("optimizer", "size_bytes"),
    [("adamw", 2400), ("adamw-bf16", 1200), ("sgd", 1200), ("none", 0)],
)
def test_the_state_of_an_optimizer_follows_from_the_shards(optimizer: str, size_bytes: int) -> None:
    beside, _ = beside_graphs([FORWARD, BACKWARD], H100)
    lines = {
        line.what: line.size_bytes
        for line in MemoryAccount(beside=beside, optimizer=optimizer).lines
    }
    assert lines.get(f"optimizer state ({optimizer})", 0) == size_bytes


def test_a_parameter_without_a_gradient_has_no_state() -> None:
    """The embedding is frozen; where no graph says which gradients there are, all count."""
    backward = _dag(("layer", "float32", 800, True), gradients=("layer",))
    for beside in beside_graphs([FORWARD, backward], H100):
        assert (beside.parameter_bytes, beside.frozen_bytes) == (1200, 400)
        states = {
            optimizer: sum(
                line.size_bytes
                for line in MemoryAccount(beside=beside, optimizer=optimizer).lines
                if line.what.startswith("optimizer state")
            )
            for optimizer in ("adamw", "adamw-bf16", "sgd")
        }
        assert states == {"adamw": 1600, "adamw-bf16": 800, "sgd": 800}
        whole = replace(beside, frozen_bytes=0, bf16_frozen_bytes=0)
        assert MemoryAccount(beside=beside).optimizer_us == pytest.approx(
            MemoryAccount(beside=whole).optimizer_us * 2 / 3
        )
    others = _dag(("layer", "float32", 800, True), gradients=("another name",))
    assert beside_graphs([FORWARD, others], H100)[0].frozen_bytes == 0


def test_inputs_without_names_have_state_where_backward_returns_their_gradients() -> None:
    """As in files that torch wrote: the second input is the batch."""
    forward = _dag(("", "float32", 800, True), ("", "float32", 64, True))
    backward = _dag(("", "float32", 5000, False), gradients=("primals_0",))
    for beside in beside_graphs([forward, backward], H100):
        assert (beside.parameter_bytes, beside.frozen_bytes) == (864, 64)
        assert beside.shards.size_bytes == 800


def test_a_step_without_gradients_has_no_state() -> None:
    """A model whose parameters are all frozen, and one that has none but an input."""
    frozen = _dag(("layer.w", "float32", 800, True), ("", "float32", 64, True))
    frozen.graph.update(parameters=("layer.w",), has_backward=False)
    none = _dag(("", "float32", 64, True))
    none.graph["has_backward"] = False
    for dag, size_bytes in ((frozen, 800), (none, 0)):
        (beside,) = beside_graphs([dag], H100)
        assert (beside.parameter_bytes, beside.frozen_bytes) == (size_bytes, size_bytes)
        account = MemoryAccount(beside=beside)
        assert not any(line.what.startswith("optimizer state") for line in account.lines)


def test_other_inputs_with_the_name_of_a_module_are_no_parameters() -> None:
    """Such as the input of the model, which backward takes again; also where a graph takes no
    parameter at all.
    """
    forward, backward = (
        _dag(("layer.w", "float32", 800, True)),
        _dag(("layer", "float32", 64, True)),
    )
    for beside in beside_graphs([forward, backward], H100):  # as in older files
        assert beside.parameter_bytes == 864
    forward.graph["parameters"] = ("layer.w",)
    found = beside_graphs([forward, backward], H100)
    assert [beside.parameter_bytes for beside in found] == [800, 800]
    assert [beside.other_parameter_bytes for beside in found] == [0, 800]
    assert beside_graph(found[1], backward, [forward, backward]).other_parameter_bytes == 800


def test_what_is_left_is_the_device_less_every_line() -> None:
    _, beside = beside_graphs([FORWARD, BACKWARD], H100)
    device = H100.device.memory_bytes
    account = MemoryAccount(
        beside=replace(beside, num_communicators=1, communicator_bytes=COMMUNICATOR_BYTES),
        reserve=0.1,
        more_communicators=1,
    )
    reserve = round(0.1 * device)
    assert [line.size_bytes for line in account.lines] == [
        400,
        2400,
        2 * COMMUNICATOR_BYTES,
        CONTEXT_BYTES,
        reserve,
    ]
    assert account.left_bytes == device - sum(line.size_bytes for line in account.lines)
    assert replace(account, reserve=1.0).left_bytes == 0


def test_inputs_without_names_are_parameters_where_no_input_has_one() -> None:
    nameless = _dag(("", "bfloat16", 64, True), ("", "float32", 100, False))
    (beside,) = beside_graphs([nameless], H100)
    assert beside.parameter_bytes == 64


def test_gloo_has_neither_context_nor_device_buffers() -> None:
    (beside,) = beside_graphs([FORWARD], load_cluster("cpu"))
    assert beside.context_bytes == beside.communicator_bytes == 0


def test_an_optimizer_that_there_is_not_is_refused() -> None:
    beside, _ = beside_graphs([FORWARD, BACKWARD], H100)
    with pytest.raises(InputError, match="expected adamw, adamw-bf16, sgd, none"):
        _ = MemoryAccount(beside=beside, optimizer="lion").lines
