"""Capture a preset on a mesh of any size, on one machine without accelerators."""

from apsched.capture.captured import Capture
from apsched.capture.fake_copy import refuse_branch, refuse_failed_model
from apsched.capture.fake_world import world
from apsched.capture.micro_batches import MicroBatchChoice
from apsched.fx.passes.checkpointing import Checkpointing, blocks_of
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.torch_compat.graphs import quiet_fake_tensors


def capture_preset(
    name: str,
    *,
    mesh: MeshSpec,
    seq_len: int = 8192,
    batch: int = 1,
    num_layers: int | None = None,
    options: ModelOptions | None = None,
    rank: int = 0,
    count_saved: bool = False,
    micro_batches: MicroBatchChoice | None = None,
) -> Capture:
    """Return the forward and backward graph of preset ``name`` on process rank ``rank``; see
    :func:`apsched.models.build.build`.
    """
    with world(mesh.world_size, rank):
        built = build(
            name, mesh=mesh, seq_len=seq_len, batch=batch, num_layers=num_layers, options=options
        )
        return capture_built(built, count_saved=count_saved, micro_batches=micro_batches)


def capture_built(
    built: BuiltModel, *, count_saved: bool = False, micro_batches: MicroBatchChoice | None = None
) -> Capture:
    """Return the graphs of a preset that is built already, on real or fake tensors; its process
    group must still run. The inputs are those of one micro-batch.

    Raises
    ------
    InputError
        where the model branches on the value of a tensor, or is one of Transformers and fails.
    """
    passes = Checkpointing.parse(built.options.activation_checkpoint).passes(
        blocks_of(built.module)
    )
    try:
        with quiet_fake_tensors():
            return (micro_batches or MicroBatchChoice()).capture(
                built.module,
                built.inputs,
                source=built.name,
                reshard_after_forward=built.options.reshard_after_forward,
                passes=passes,
                count_saved=count_saved,
            )
    except Exception as error:
        refuse_branch(error, f"{built.name}: ")
        refuse_failed_model(error, f"{built.name}: ")
        raise
