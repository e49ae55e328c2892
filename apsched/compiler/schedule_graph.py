"""``schedule_graph``: the one function that every surface in a compiler calls."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch

from apsched.capture.graph_module import capture_graph, direction_of
from apsched.compiler.inductor_settings import check_inductor
from apsched.compiler.ranks.agreement import GraphAgreement, agreement_of, check_launches
from apsched.compiler.schedule_captured import RESULT, groups_of, scheduled
from apsched.compiler.settings import Settings
from apsched.errors import AgreementError, ApschedError
from apsched.fx.collectives import is_collective
from apsched.fx.control_deps import without_control_deps
from apsched.pipeline.result import Result
from apsched.quantities import show_bytes, show_us
from apsched.report.assumed_sizes import assumed_text
from apsched.schedule.result import captured_of
from apsched.units import ticks_to_us
from apsched.writeback.hold_order import hold_order

logger = logging.getLogger(__name__)


def schedule_graph(
    gm: torch.fx.GraphModule,
    settings: Settings,
    *,
    name: str | None = None,
    kept_inputs: Iterable[str] | None = None,
    parameter_names: Mapping[str, str] | None = None,
    held: bool = False,
    agreement: GraphAgreement | None = None,
) -> torch.fx.GraphModule:
    """Return ``gm`` scheduled; ``gm`` itself, the same object, where it has no collectives, or with
    ``on_error="fallback"`` on an error.

    Every node needs ``meta["val"]``; see :func:`apsched.capture.graph_module.capture_graph`
    for the other arguments, which matter to memory (``kept_inputs``: placeholders that the caller
    keeps alive) and plans (``parameter_names``: placeholder -> name), and follow from the names and
    descriptors that AOTAutograd gives placeholders where they are not given. What is returned runs
    in graph order, with ``held`` also through full Inductor; its :class:`apsched.Result` is
    ``module.meta["apsched_result"]``. ``agreement`` is that of the process ranks on this graph,
    where it was opened already. One line is logged for each graph.

    Raises
    ------
    ApschedError
        (``InputError``, ``InfeasibleError``, ``RoundTripError``) with ``on_error="raise"``, where
        the graph cannot be scheduled; ``AgreementError`` whatever ``on_error`` says, where process
        ranks of the job would launch different collectives, or one of them does not answer.
    """
    free = without_control_deps(gm)
    agreement = agreement or agreement_of(free, settings.deadline_s)
    with agreement or nullcontext():
        fast, run = _scheduled_or_as_it_was(
            free, settings, agreement, name, kept_inputs, parameter_names, held=held
        )
        result: Result | None = fast.meta.get(RESULT) if fast is not free else None
        if agreement is not None:
            check_launches(agreement, fast, free, _names(result))
    if result is not None:
        logger.info("%s", told(result))
    return gm if run is free else run


def _scheduled_or_as_it_was(
    gm: torch.fx.GraphModule,
    settings: Settings,
    agreement: GraphAgreement | None,
    name: str | None,
    kept_inputs: Iterable[str] | None,
    parameter_names: Mapping[str, str] | None,
    *,
    held: bool,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return the graph scheduled, and as it is to be run: with ``held`` with control dependencies,
    which hide what is launched.
    """
    try:
        if not any(is_collective(node) for node in gm.graph.nodes):
            return gm, gm
        if held:
            check_inductor()
        captured = capture_graph(
            gm, name=name, kept_inputs=kept_inputs, parameter_names=parameter_names
        )
        fast = scheduled(captured, settings, agreement)
        return fast, hold_order(fast, group_ranks=groups_of(gm.graph, settings)) if held else fast
    except AgreementError:
        raise  # the other process ranks may run something else, whatever this one does
    except Exception as error:
        same = kept_as_it_was(gm, error, settings, name)
        return same, same


def kept_as_it_was(
    gm: torch.fx.GraphModule, error: Exception, settings: Settings, name: str | None = None
) -> torch.fx.GraphModule:
    """Return ``gm``, which ``error`` kept from being scheduled, and log that; raise ``error`` where
    ``settings`` say so.
    """
    if settings.on_error == "raise":
        raise error
    unexpected = error if not isinstance(error, ApschedError) else None
    logger.warning(
        "%s stays as it was: %s", name or direction_of(gm.graph), error, exc_info=unexpected
    )
    return gm


def _names(result: Result | None) -> dict[str, str]:
    """Return start node -> the parameter or module that it serves."""
    if result is None:
        return {}
    problem = result.problem
    return {problem.node_names[c.start]: c.module for c in problem.collectives if c.module}


def told(result: Result) -> str:
    """Return the line that is logged about a scheduled graph."""
    assert result.best is not None
    before = captured_of(result.answer.baselines)
    was = (
        f" (as captured {show_us(ticks_to_us(before.step_time_ticks))}, {before.num_launches})"
        if before
        else ""
    )
    assumed = f"; assumed: {assumed_text(result.assumptions)}" if result.assumptions else ""
    gap = (
        f"gap {100 * result.gap:.3f} %"
        if result.answer.bound_ticks
        else f"bound {result.answer.bound_source}"
    )
    return (
        f"{result.problem.name}: step time {show_us(result.step_time_us or 0.0)} with"
        f" {result.best.num_launches} collectives{was}, {gap}, peak"
        f" {show_bytes(result.best.peak_memory_bytes)}, {result.seconds['solve']:.1f} s{assumed}"
    )
