"""``schedule_graph``: the one function that every surface in a compiler calls."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import torch

from apsched.capture.graph_module import capture_graph, direction_of
from apsched.compiler.eager_parallel import warn_of_hidden_collectives
from apsched.compiler.inductor_settings import check_inductor
from apsched.compiler.ranks.agreement import GraphAgreement, agreement_of
from apsched.compiler.ranks.answer import Answers
from apsched.compiler.ranks.failures import in_words
from apsched.compiler.ranks.launches import Launch, collectives_digest, launches_of
from apsched.compiler.schedule_captured import RESULT, groups_of, process_rank, scheduled
from apsched.compiler.settings import Settings
from apsched.errors import AgreementError, ApschedError
from apsched.fx.collectives import is_collective
from apsched.fx.control_deps import without_control_deps
from apsched.graph.records import ParameterShard
from apsched.pipeline.assumptions import unused_hints
from apsched.pipeline.result import Result
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.assumed_sizes import assumed_text
from apsched.schedule.result import captured_of
from apsched.torch_compat.graphs import is_compiled_again
from apsched.units import ticks_to_us
from apsched.writeback.hold_order import hold_order

logger = logging.getLogger(__name__)

Names = Mapping[str, str] | Callable[[], Mapping[str, str] | None]
Launches = dict[str, tuple[Launch, ...]]
"""By group."""
T = TypeVar("T")


def schedule_graph(
    gm: torch.fx.GraphModule,
    settings: Settings,
    *,
    name: str | None = None,
    kept_inputs: Iterable[str] | None = None,
    parameter_names: Names | None = None,
    shards: Mapping[str, ParameterShard] | None = None,
    held: bool = False,
    agreement: GraphAgreement | None = None,
    solved: Answers | None = None,
) -> torch.fx.GraphModule:
    """Return ``gm`` scheduled; ``gm`` itself, the same object, where it has no collectives, or with
    ``on_error="fallback"`` on an error.

    Placeholders need ``meta["val"]``; see :func:`apsched.capture.graph_module.capture_graph` for
    the other arguments, which matter to memory (``kept_inputs``: placeholders that the caller keeps
    alive) and plans (``parameter_names``: placeholder -> name, or a function that finds them or
    writes them into the graph), and follow from the names and descriptors that AOTAutograd gives
    placeholders where they are not given; ``shards`` has all parameters of the step, which are on
    the device whether this graph takes them or not. The returned module runs in graph order, with
    ``held`` also through full Inductor; its :class:`apsched.Result` is
    ``module.meta["apsched_result"]``.
    ``agreement`` is that of the process ranks on this graph, where it was opened already, and
    ``solved`` has answers that this process found before. One line is logged for each graph.

    With ``on_error="fallback"`` no error leaves it, wherever one appears, and all process ranks of
    the job run the graph as it was where one of them has to.

    Raises
    ------
    ApschedError
        with ``on_error="raise"``: ``InputError``, ``InfeasibleError``, ``RoundTripError`` where the
        graph cannot be scheduled, ``AgreementError`` where process ranks of the job would launch
        different collectives, or one of them does not answer.
    """

    def attempt(agreement: GraphAgreement | None) -> tuple[_RunAndLine, Launches]:
        names = parameter_names() if callable(parameter_names) else parameter_names
        free = without_control_deps(gm)
        if not any(is_collective(node) for node in free.graph.nodes):
            warn_of_hidden_collectives(process_rank(), direction_of(free.graph))
            return (gm, ""), {}
        if held:
            check_inductor()
        captured = capture_graph(free, name=name, kept_inputs=kept_inputs, parameter_names=names)
        captured = replace(captured, shards=shards or {})
        fast = scheduled(captured, settings, agreement, solved)
        run = hold_order(fast, group_ranks=groups_of(free.graph, settings)) if held else fast
        _warn_of_unused_hints(fast.meta[RESULT], settings)
        found = run, scheduled_line(fast.meta[RESULT])
        if agreement is None:
            return found, {}
        with agreement.job.working():
            return found, launches_of(fast, free, _names(fast.meta[RESULT]))

    run, line = all_or_none(
        lambda: agreement or agreement_of(gm, settings.deadline_s),
        (gm, ""),
        settings,
        name or direction_of(gm.graph),
        attempt,
    )
    if line:
        logger.info("%s", line)
    return run


def prepare_joint(
    joint: torch.fx.GraphModule,
    settings: Settings,
    prepare: Callable[[GraphAgreement | None], T],
    stated: Mapping[str, object] | None = None,
) -> T | None:
    """Return the result of ``prepare``, which prepares ``joint`` for the partitioner, given the
    agreement of the process ranks on it; with ``on_error="fallback"`` nothing where that fails on
    any process rank, or where the settings ``stated`` are not the same on all. ``None``: they are
    compared already.
    """

    def attempt(agreement: GraphAgreement | None) -> tuple[T, Launches]:
        if agreement is not None and stated is not None:
            capped = "None" if settings.memory_cap is None else "stated"
            known = {**stated, "memory_cap": capped, "on_error": settings.on_error}
            texts = {name: str(value) for name, value in known.items()}
            agreement.same_settings(collectives_digest(joint), texts)
        return prepare(agreement), {}

    return all_or_none(
        lambda: agreement_of(joint, settings.deadline_s),
        None,
        settings,
        "joint",
        attempt,
    )


_RunAndLine = tuple[torch.fx.GraphModule, str]
"""The graph to execute, and the line about it; empty where it is as it was."""


def all_or_none(
    agree: Callable[[], GraphAgreement | None],
    as_it_was: T,
    settings: Settings,
    name: str,
    attempt: Callable[[GraphAgreement | None], tuple[T, Launches]],
) -> T:
    """Return the result of ``attempt``, where it succeeds on all process ranks that ``agree`` and
    they launch the same; else ``as_it_was``, or the error, as ``settings`` say.
    """
    try:
        agreement = agree()
    except Exception as error:  # torch's store cannot be had: on no process rank
        kept_as_it_was(as_it_was, error, settings, name)
        return as_it_was
    with agreement or nullcontext():
        kept, launches = "", Launches()
        try:
            result, launches = attempt(agreement)
        except Exception as error:
            refuse_lone_compilation(error)
            kept_as_it_was(as_it_was, error, settings, name)
            result, kept = as_it_was, str(in_words(error, process_rank()))
            if agreement is not None:
                agreement.give_up(error)
        if agreement is None:
            return result
        try:
            agreement.check(launches, kept)
        except AgreementError as error:
            refuse_lone_compilation(error)
            if not kept:
                kept_as_it_was(as_it_was, error, settings, name)
            return as_it_was
    return result


def refuse_lone_compilation(error: Exception) -> None:
    """Raise ``error`` where this process rank compiles code again, and others do not answer: they
    may run the scheduled code of before, which launches otherwise than the graph as it was.
    """
    if isinstance(error, AgreementError) and error.is_silent and is_compiled_again():
        raise AgreementError(
            f"{error}. This process rank compiles this code again, since sizes changed. Where the"
            " others run their code of before, a fallback here would launch other collectives:"
            " compile with torch.compile(..., dynamic=True), or give all process ranks the same"
            " sizes",
            is_silent=True,
        ) from error


def kept_as_it_was(it: T, error: Exception, settings: Settings, name: str) -> T:
    """Return ``it``, which ``error`` kept from being scheduled, and log that; raise ``error`` if
    ``settings`` require it.
    """
    if settings.on_error == "raise":
        raise error
    unexpected = error if not isinstance(error, ApschedError) else None
    logger.warning("%s stays unchanged: %s", name, error, exc_info=unexpected)
    return it


def _warn_of_unused_hints(result: Result, settings: Settings) -> None:
    """Warn, on process rank 0, where a graph has sizes that depend on data and no hint is about one
    of them. It is no error: the hints may be about another graph of the job.
    """
    sizes = result.assumptions.sizes if result.assumptions else ()
    text = unused_hints(settings.stated_hints, sizes, "the graph has")
    if text and process_rank() == 0:
        logger.warning("hints have no effect on %s: %s", result.problem.name, text)


def _names(result: Result) -> dict[str, str]:
    """Return start node -> the parameter or module that it serves."""
    problem = result.problem
    return {problem.node_names[c.start]: c.module for c in problem.collectives if c.module}


def scheduled_line(result: Result) -> str:
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
        f"gap {show_gap(result.gap)}"
        if result.answer.bound_ticks
        else f"bound {result.answer.bound_source}"
    )
    return (
        f"{result.problem.name}: step time {show_us(result.step_time_us or 0.0)} with"
        f" {result.best.num_launches} collectives{was}, {gap}, peak"
        f" {show_bytes(result.best.peak_memory_bytes)}, {result.seconds['solve']:.1f} s{assumed}"
    )
