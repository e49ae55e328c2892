"""Reads the options of a command into the frozen records that the stages take."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apsched.config import Caps, MilpOptions, ScenarioOptions, SolveOptions, Unit, scenario_options
from apsched.errors import InputError
from apsched.options_table import BY_NAME, CAPS, in_group

if TYPE_CHECKING:
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.pipeline.load import LoadedGraph
    from apsched.pipeline.solve_graph import SolveRequest
    from apsched.pipeline.sources import SourceRequest
    from apsched.problem.plan.rules import Plan
    from apsched.whole_step.keep_request import KeepRequest


def stated(args: argparse.Namespace, name: str) -> Any:
    """Return the value of an option, its default where it is left out or the verb has none such;
    ``InputError`` names its flag.
    """
    option = BY_NAME[name]
    text = getattr(args, name, None)
    return option.default if text is None else option.read(text)


def source_request(args: argparse.Namespace) -> "SourceRequest":
    """Return the SOURCE and its options."""
    from apsched.pipeline.sources import SourceRequest

    chosen = {
        option.field_name: stated(args, option.name)
        for option in in_group("source")
        if option.name not in ("direction", "hints", "unpacked_limit")
    }
    chosen["hints"] = tuple(BY_NAME["hints"].read(",".join(getattr(args, "hints", []))).items())
    count_saved = True if getattr(args, "saved_bytes", False) else None
    return SourceRequest(source=args.source, count_saved=count_saved, **chosen)


def cost_choice(args: argparse.Namespace) -> "CostChoice":
    """Return the sources of costs."""
    from apsched.pipeline.cost_choice import CostChoice
    from apsched.problem.contention_spec import ContentionChoice, parse_contention

    contention = stated(args, "contention")
    return CostChoice(
        cluster=args.cluster,
        costs=args.costs,
        collectives=tuple(args.collectives),
        fused=not args.unfused,
        contention=ContentionChoice() if contention is None else parse_contention(contention),
    )


def direction(args: argparse.Namespace) -> str:
    """Return which graphs are wanted."""
    return str(stated(args, "direction"))


def micro_batches_in_a_row(args: argparse.Namespace, which: str) -> int:
    """Return the number of micro-batches of ``--accumulate``, 1 where it is left out; ``which`` are
    the graphs that are wanted.
    """
    from apsched.whole_step.choices import NONE

    num_micro_batches = stated(args, "accumulate")
    if num_micro_batches is None:
        return 1
    if args.keep == NONE:
        raise InputError(
            "--accumulate: expected a choice of the parameters that micro-batches share, found"
            " --keep none; leave it out, or choose --keep auto, --keep all or --keep with a file"
        )
    if which != "both":
        raise InputError(
            f"--accumulate: expected forward and backward apart, found --direction {which}; choose"
            " --direction both (one graph of all micro-batches: --micro-batches)"
        )
    return int(num_micro_batches)


def kept_parameters(args: argparse.Namespace, which: str) -> "KeepRequest":
    """Return the request for kept parameters; ``which`` are the graphs that are wanted.

    Left out, it is ``auto`` for forward and backward of one step, apart or as one graph, as far as
    they have such a choice; ``none`` for a single graph, for the MILP, which solves each graph
    alone, and for graphs that torch wrote: a job has chosen already, and replays schedules of just
    these graphs.
    """
    from apsched.pipeline.sources import SourceKind, classify
    from apsched.whole_step.keep_request import (
        AUTO,
        DEFAULT,
        KeepRequest,
        keep_request,
        of_direction,
    )

    if args.keep is not None:
        return of_direction(keep_request(args.keep), which)
    if which not in ("both", "joint") or getattr(args, "solver", "cp-sat") != "cp-sat":
        return KeepRequest()
    if getattr(args, "frontier", None) is not None or args.accumulate is not None:
        return keep_request(AUTO)  # they need the choice
    return KeepRequest() if classify(args.source) is SourceKind.REPRO else DEFAULT


def solve_request(args: argparse.Namespace, keep: "KeepRequest | None" = None) -> "SolveRequest":
    """Return all that is requested of a solve, with the parameters ``keep`` kept, by default those
    that ``--keep`` states; a plan with ``--buckets`` depends on the graphs (:func:`with_buckets`).
    """
    from apsched.pipeline.solve_graph import SolveRequest
    from apsched.problem.plan.apply import check_chooses_kept
    from apsched.problem.plan.plan_file import load_plan
    from apsched.problem.plan.rules import Plan
    from apsched.whole_step.keep_request import keep_request, plan_for

    milp = _milp(args)
    limits = (option for option in CAPS if option.unit is not Unit.MEMORY_CAP)
    stated_plan = stated(args, "plan")
    plan = Plan() if stated_plan is None else load_plan(stated_plan)
    plan = plan_for(plan, keep or keep_request(getattr(args, "keep", None)))
    check_chooses_kept(plan)  # before anything is captured
    return SolveRequest(
        caps=Caps(
            **{option.field_name: stated(args, option.name) for option in limits},
            max_compute_move=_compute_move(args, milp),
        ),
        memory_cap=stated(args, "memory_cap"),
        optimizer=stated(args, "optimizer"),
        reserve=stated(args, "reserve"),
        options=SolveOptions(
            **{option.field_name: stated(args, option.name) for option in in_group("search")}
        ),
        plan=plan,
        bitwise=stated(args, "bitwise"),
        scenarios=_scenarios(args, milp),
        second_group=_second_group(args, milp),
        milp=milp,
    )


def _compute_move(args: argparse.Namespace, milp: MilpOptions | None) -> int | None:
    """Return the cap on moves of compute; the MILP keeps compute as captured."""
    if milp is None:
        move: int | None = stated(args, "max_compute_move")
        return move
    if args.max_compute_move not in (None, "0"):
        raise InputError(
            "--max-compute-move: the milp keeps compute as captured; expected 0, found"
            f" {args.max_compute_move!r}"
        )
    return 0


def _scenarios(args: argparse.Namespace, milp: MilpOptions | None) -> ScenarioOptions | None:
    """Return the scenarios that are requested; ``None`` for none."""
    chosen = scenario_options(
        stated(args, "scenarios"), stated(args, "noise"), stated(args, "robust"), dashes="--"
    )
    if chosen is not None and milp is not None:
        raise InputError(
            "--scenarios: the milp solves for the costs as they are; leave --solver out"
        )
    return chosen


def _second_group(args: argparse.Namespace, milp: MilpOptions | None) -> bool:
    """Return whether second groups are tried."""
    chosen = bool(stated(args, "second_group"))
    if chosen and milp is not None:  # two groups share links, which the milp does not know
        raise InputError(
            "--second-group: the milp solves on the groups of the graph; leave --solver out, or"
            " --second-group"
        )
    return chosen


def _milp(args: argparse.Namespace) -> MilpOptions | None:
    """Return the options of the MILP; ``None`` if CP-SAT and the search solve."""
    name, colon, solver_name = str(stated(args, "solver")).partition(":")
    if name == "cp-sat" and not colon:
        if getattr(args, "time_limit", None) is not None:
            raise InputError(
                "--time-limit: it limits --solver milp; the search is limited by --budget"
            )
        return None
    if name != "milp" or (colon and not solver_name):
        raise InputError(
            "--solver: expected cp-sat, milp or milp:NAME with a solver that PuLP knows; found"
            f" {args.solver!r}"
        )
    from apsched.solver.milp.engine import check_solver

    chosen = MilpOptions(
        solver_name=solver_name or MilpOptions().solver_name,
        time_limit_s=stated(args, "time_limit"),
    )
    check_solver(chosen.solver_name)
    return chosen


def out_dir(args: argparse.Namespace, default: str) -> Path:
    """Return the directory for output files."""
    return Path(args.out) if args.out is not None else Path("apsched-out") / default


def check_out_dir(args: argparse.Namespace) -> None:
    """Raise ``InputError`` where output files cannot be written, or would hide the source."""
    from apsched.artifacts.output_dir import check_writable
    from apsched.pipeline.sources import check_not_source

    check_not_source(out_dir(args, "."), args.source)
    check_writable(out_dir(args, "."))


def request_with_buckets(
    buckets: str | None, request: "SolveRequest", graphs: "Sequence[LoadedGraph]"
) -> "SolveRequest":
    """Return ``request`` with the buckets of ``--buckets`` in its plan."""
    return replace(request, plan=with_buckets(request.plan, buckets, graphs))


def with_buckets(
    plan: "Plan", chosen_buckets: str | None, graphs: "Sequence[LoadedGraph]"
) -> "Plan":
    """Return ``plan`` with the buckets of ``chosen_buckets``: ``none``, ``block``, or a file with
    an entry a line.
    """
    if chosen_buckets is None:
        return plan
    from apsched.problem.plan.module_buckets import NO_BUCKETS, ModuleBuckets, user_buckets
    from apsched.solver.baselines import block_labels

    if chosen_buckets == "none":
        return replace(plan, rules=(*plan.rules, *NO_BUCKETS.rules))
    labels: dict[str, str] = {}
    for graph in graphs:
        labels = block_labels(graph.problem) | labels
    labels.pop("", None)
    if not labels:
        raise InputError(
            "--buckets: expected collectives that serve parameters with names, found none; leave"
            " it out"
        )
    if chosen_buckets == "block":
        buckets = {
            label: tuple(name for name in labels if labels[name] == label)
            for label in dict.fromkeys(labels.values())
        }
        made = ModuleBuckets(buckets=buckets)
    else:
        made = user_buckets(_entries(chosen_buckets), list(labels))
    rules = made.plan([graph.problem for graph in graphs]).rules
    return replace(plan, rules=(*plan.rules, *rules))


def _entries(path: str) -> list[str]:
    """Return the entries of a file: a line each, without empty lines and comments (``# ...``)."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--buckets: expected none, block or a file of module names, found {path!r}: {error}"
        ) from None
    entries = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        raise InputError(f"--buckets: expected module names, one a line, in {path}; found none")
    return entries
