"""For TorchTitan's graph trainer: the pass pipeline ``apsched``, chosen by
``--compile.pass_pipeline apsched``.

    # my_job/config_registry.py, for
    # torchrun ... -m torchtitan.train --module my_job --config graph_trainer_llama3_8b ...
    from torchtitan.experiments.graph_trainer.llama3.config_registry import *
    from apsched.integrations.torchtitan import register

    register(cluster="h100", memory_cap="60GiB")

The pipeline is TorchTitan's own but for one pass: a solved schedule of the joint forward and
backward graph replaces the pass that buckets and prefetches by transformer block. Earlier passes
decide which activations are saved, and whether parameters are gathered again; with
``register(keep=...)`` one more pass decides on parameters.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from os import PathLike
from typing import Any

import torch
from torch.fx import GraphModule

from apsched.capture.micro_batches import REDUCE_EACH, MicroBatchChoice
from apsched.compiler.ranks.answer import Answers
from apsched.compiler.schedule_graph import schedule_graph
from apsched.compiler.settings import Settings
from apsched.errors import InputError
from apsched.fx.graph_copies import copied
from apsched.integrations.torchtitan_keep import (
    PassFunction,
    apsched_keep_pass,
    apsched_reshard_pass,
)
from apsched.integrations.torchtitan_micro_batches import (
    ALONE,
    JoinedMicroBatches,
    check_accumulation,
    mark_micro_batches,
    passes_before_tags,
)
from apsched.problem.plan.apply import check_chooses_kept
from apsched.problem.plan.plan_file import as_plan
from apsched.torch_compat.compilers import describe_gradients
from apsched.whole_step.keep_request import (
    KeepRequest,
    keep_request,
    of_one_micro_batch,
    plan_for,
)

logger = logging.getLogger(__name__)

PIPELINE = "apsched"
REPLACED = "joint_transformer_block_bucketing_reordering_pass"
"""The pass of TorchTitan's pipeline whose place is taken."""
TAGS = "tag_with_memory_policy_pass"
"""The pass of TorchTitan's pipeline that tags nodes which backward repeats."""

_AFTERWARDS = ("schedule_fsdp_comms_to_dense_regions_pass", "ep_overlap_schedule_pass")
"""Passes behind it that order collectives themselves, in buckets as it makes them."""

_GRAPH_TRAINER = "torchtitan.experiments.graph_trainer"


def register(
    *,
    keep: str | PathLike[str] | Sequence[str] | None = None,
    micro_batches: int = 1,
    reduce: str = REDUCE_EACH,
    **settings: Any,
) -> None:
    """Register the pipeline ``apsched`` with TorchTitan; ``settings`` are those of
    :class:`apsched.compiler.settings.Settings`.

    ``keep`` are the parameters that are not gathered again in backward: ``"none"``, ``"all"``,
    ``"auto"``, names or regular expressions, or a file of them, as for :func:`apsched.backend`, and
    ``NAME @node`` for those of which each process rank keeps one part, and gathers the others of
    its node. It takes the place of ``--parallelism.fsdp_reshard_after_forward``; ``None`` leaves
    that in force. Parameters of ``lm_head``, which TorchTitan never gathers again, stay as they
    are.

    Where the trainer accumulates gradients, ``micro_batches`` of its micro-batches are one graph,
    which is scheduled with their nodes interleaved. With ``reduce="each"`` each micro-batch reduces
    its own gradients, as in TorchTitan; with two the sums are the same bit for bit. With ``"once"``
    the gradients are added before they are reduced.

    With ``bitwise=True`` gradients are reduced in the buckets and payload order of eager FSDP2, as
    TorchTitan's own pass does it. A later call takes the place of an earlier one.

    Raises
    ------
    InputError
        for a wrong setting, and without TorchTitan.
    """
    chosen = Settings.of(settings)
    joined = MicroBatchChoice.of(micro_batches, reduce)
    stated = None
    if keep is not None:
        stated = of_one_micro_batch(keep_request(keep, "keep"), "keep")
        chosen = replace(chosen, plan=plan_for(as_plan(chosen.plan), stated))
    check_chooses_kept(as_plan(chosen.plan))
    registry = _titan("registry")
    pipeline = partial(apsched_pipeline, settings=chosen, keep=stated, joined=joined)
    registry.register_pass_pipeline(PIPELINE)(pipeline)
    registry.register_post_init_hook(PIPELINE)(
        partial(set_up_trainer, settings=chosen, joined=joined)
    )


def set_up_trainer(trainer: Any, *, settings: Settings, joined: MicroBatchChoice = ALONE) -> None:
    """Have ``trainer`` run ``joined`` of its micro-batches as one graph. Refuse one with the
    pipeline ``apsched`` whose steps never run a pipeline: with pipeline parallelism, in another
    mode than ``aot_fx_trace``, without passes, or with an artifact that was compiled before; and
    one that accumulates another number of micro-batches.

    Raises
    ------
    InputError
        with ``on_error="raise"``; with ``"fallback"`` it is a warning.
    """
    if found := _never_scheduled(trainer):
        _unscheduled(found, settings)
    elif joined.count > 1:
        try:
            check_accumulation(trainer.gradient_accumulation_steps, joined.count)
        except InputError as error:
            _refuse(error, "each micro-batch is a graph of its own", settings)
        else:
            trainer.forward_backward_step = JoinedMicroBatches(trainer, joined.count)


def _never_scheduled(trainer: Any) -> str:
    """Return why the steps of ``trainer`` never run a pipeline; empty where they do."""
    compile_config = trainer.config.compile
    if trainer.parallel_dims is not None and trainer.parallel_dims.pp_enabled:
        return (
            "pipeline parallelism, whose stages are compiled without a pass pipeline: take"
            " --parallelism.pipeline_parallel_degree 1"
        )
    if not compile_config.enable or compile_config.mode != "aot_fx_trace":
        return (
            f"--compile.mode {compile_config.mode}, which has no joint graph: take --compile.enable"
            " --compile.mode aot_fx_trace"
        )
    if not compile_config.enable_passes:
        return "--compile.enable_passes turned off: turn it on"
    return _PRECOMPILED if compile_config.precompile_artifact_dir else ""


_PRECOMPILED = (
    "--compile.precompile_artifact_dir: an artifact is made by TorchTitan's own passes, whatever"
    " pipeline is chosen: leave it out"
)


def _unscheduled(found: str, settings: Settings) -> None:
    error = InputError(
        f"--compile.pass_pipeline {PIPELINE}: expected steps that are traced for a pass pipeline,"
        f" found {found}, or choose another pipeline"
    )
    _refuse(error, "nothing is scheduled", settings)


def _refuse(error: InputError, instead: str, settings: Settings) -> None:
    """Raise ``error``, or with ``on_error="fallback"`` log it with the consequence ``instead``."""
    if settings.on_error == "raise":
        raise error
    logger.warning("%s; %s", error, instead)


def apsched_pipeline(
    traced_result: Any,
    config: Any,
    *,
    parallel_dims: Any = None,
    settings: Settings | None = None,
    keep: KeepRequest | None = None,
    joined: MicroBatchChoice = ALONE,
) -> list[PassFunction]:
    """Return TorchTitan's default passes for a traced step, with apsched's in the place of
    :data:`REPLACED`; with ``keep`` also one behind :data:`TAGS`.

    ``InputError``, or with ``on_error="fallback"`` a warning and TorchTitan's passes, where a
    precompiled artifact is loaded: TorchTitan's own passes made it.
    """
    settings = settings or Settings()
    passes: list[PassFunction] = _titan("passes").construct_default_graph_passes(
        traced_result, config, parallel_dims=parallel_dims
    )
    first = _place_of_tags(passes)
    passes[first:first] = passes_before_tags(joined)
    names = [pass_name(one) for one in passes]
    if REPLACED not in names and config.compile.precompile_artifact_dir:
        _unscheduled(_PRECOMPILED, settings)
        return passes
    place = _place_of_replaced(names)
    solved: Answers = {}  # so that a graph that is compared below is not solved again
    scheduling = partial(
        apsched_scheduling_pass,
        traced_result=traced_result,
        settings=settings,
        held=config.compile.inductor_compilation == "full",
        joined=joined,
        solved=solved,
    )
    if keep is None:
        return [*passes[:place], scheduling, *passes[place + 1 :]]
    tagged = names.index(TAGS) + 1 if TAGS in names[:place] else place
    disabled = config.compile.disable_passes
    between = passes[tagged:place]
    names_of_parameters = partial(state_names, traced_result=traced_result)
    in_node: set[str] = set()  # parameters that the first pass has the second one reshard
    keeping = partial(
        apsched_keep_pass,
        keep=keep,
        names=names_of_parameters,
        gradients=partial(gradient_names, traced_result=traced_result),
        describe=partial(describe_joint, traced_result=traced_result, joined=joined),
        until_scheduled=[one for one in between if pass_name(one) not in disabled],
        settings=settings,
        solved=solved,
        in_node=in_node,
    )
    resharding = partial(
        apsched_reshard_pass, names=names_of_parameters, settings=settings, in_node=in_node
    )
    return [*passes[:tagged], keeping, *between, resharding, scheduling, *passes[place + 1 :]]


def _place_of_replaced(names: Sequence[str]) -> int:
    if REPLACED not in names:
        raise InputError(
            f"expected {REPLACED} among TorchTitan's passes, found {', '.join(names)}; this version"
            " of torchtitan is not known (0.3 is)"
        )
    place = names.index(REPLACED)
    if later := [name for name in names[place:] if name in _AFTERWARDS]:
        raise InputError(
            f"expected no pass after apsched's that orders collectives again, found {later[0]};"
            " turn off --compile.enable_fsdp_dense_region_overlap and"
            " --compile.ep_overlap.enabled, or choose another pipeline"
        )
    return place


def _place_of_tags(passes: Sequence[PassFunction]) -> int:
    names = [pass_name(one) for one in passes]
    return names.index(TAGS) if TAGS in names else 0


def apsched_scheduling_pass(
    gm: GraphModule,
    example_inputs: Any = None,
    *,
    traced_result: Any,
    settings: Settings,
    held: bool = False,
    joined: MicroBatchChoice = ALONE,
    solved: Answers | None = None,
) -> GraphModule:
    """Return the joint graph ``gm`` scheduled; parameters and the order of their gradients are
    those of ``traced_result``, and ``joined`` the micro-batches that it has. ``solved`` has answers
    that were found before.
    """
    result = copied(gm)

    def names() -> dict[str, str]:
        if not gradient_names(result, traced_result):
            logger.warning(
                "the outputs of the traced step are not its loss and the gradients of its"
                " parameters; schedules name no gradients"
            )
        return describe_joint(result, traced_result, joined)

    return schedule_graph(
        result, settings, name="joint", parameter_names=names, held=held, solved=solved
    )


def describe_joint(
    gm: GraphModule, traced_result: Any, joined: MicroBatchChoice = ALONE
) -> dict[str, str]:
    """Return the names of the state of the joint graph ``gm`` (:func:`state_names`). Describe its
    gradients and mark its micro-batches in place.
    """
    describe_gradients(gm.graph, gradient_names(gm, traced_result))
    names = state_names(gm, traced_result)
    if joined.count > 1:
        mark_micro_batches(gm, len(names), joined.count)
    return names


def state_names(gm: GraphModule, traced_result: Any) -> dict[str, str]:
    """Return placeholder -> name of the parameter or buffer; a DTensor is several placeholders, its
    local tensor first.
    """
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    names: dict[str, str] = {}
    for state, fqn in enumerate(traced_result.state_fqns):
        for _ in range(_width(traced_result.input_subclass_layouts, state)):
            names[next(placeholders).name] = fqn
    return names


def gradient_names(gm: GraphModule, traced_result: Any) -> dict[int, str]:
    """Return position among the graph's outputs -> name of the parameter whose gradient it is;
    empty where that is not sure.

    The step returns its loss, then a gradient for each parameter in order of registration, which is
    that of ``state_fqns``; buffers, which have none, come behind. So the names are sure where each
    gradient has the shape of its parameter.
    """
    values = gm.graph.output_node().args[0]
    assert isinstance(values, list | tuple)
    shapes = _first_shapes(gm, traced_result)
    layouts, place = (
        traced_result.output_subclass_layouts,
        _width(traced_result.output_subclass_layouts, 0),
    )
    names: dict[int, str] = {}
    for output, (fqn, shape) in zip(range(1, traced_result.num_flat_outputs), shapes, strict=False):
        node = values[place]
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            return {}
        names[place] = fqn
        place += _width(layouts, output)
    return names if place == len(values) else {}


def _first_shapes(gm: GraphModule, traced_result: Any) -> list[tuple[str, Any]]:
    """Return name and shape of the first tensor of each state."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    shapes, place = [], 0
    for state, fqn in enumerate(traced_result.state_fqns):
        shapes.append((fqn, getattr(placeholders[place].meta.get("val"), "shape", None)))
        place += _width(traced_result.input_subclass_layouts, state)
    return shapes


def _width(layouts: Mapping[int, Any], k: int) -> int:
    """Return the number of plain values that stand for value ``k``."""
    return int(layouts[k].num_tensors) if k in layouts else 1


def pass_name(one: Any) -> str:
    """Return the name of a pass, which may be partially applied."""
    return str(getattr(one.func if isinstance(one, partial) else one, "__name__", one))


def _titan(module: str) -> Any:
    try:
        return import_module(f"{_GRAPH_TRAINER}.{module}")
    except ImportError as error:
        raise InputError(
            f"the pipeline {PIPELINE!r} needs torchtitan ({error}); run pip install"
            " 'apsched[torchtitan]'"
        ) from None
