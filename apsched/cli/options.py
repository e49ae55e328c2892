"""Reads the options of a command into the frozen records that the stages take."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, MilpOptions, ScenarioOptions, SolveOptions
from apsched.errors import InputError
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import DIRECTIONS, LoadedGraph
from apsched.pipeline.sources import SourceRequest
from apsched.problem.contention_spec import ContentionChoice, parse_contention
from apsched.problem.plan.plan_file import load_plan
from apsched.problem.plan.rules import Plan
from apsched.quantities import (
    MemoryCap,
    parse_count,
    parse_memory_cap,
    parse_number,
    parse_optional_bytes,
    parse_optional_count,
    parse_share,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChoice:
    """What limits the schedule and the search."""

    caps: Caps
    """All caps but that on memory, which may depend on the graph."""
    memory_cap: MemoryCap | None
    """``None``: the device's memory."""
    options: SolveOptions


def source_request(args: argparse.Namespace) -> SourceRequest:
    """Return the SOURCE and what was chosen about it."""
    return SourceRequest(
        source=args.source,
        mesh=args.mesh,
        seq_len=_count(args.seq, "--seq"),
        batch=_count(args.batch, "--batch"),
        num_layers=_count(args.layers, "--layers"),
        activation_checkpoint=args.ac,
        count_saved=True if getattr(args, "saved_bytes", False) else None,
    )


def cost_choice(args: argparse.Namespace) -> CostChoice:
    """Return where costs come from."""
    asked = getattr(args, "contention", None)
    return CostChoice(
        cluster=args.cluster,
        costs=args.costs,
        collectives=tuple(args.collectives),
        fused=not args.unfused,
        contention=parse_contention(asked) if asked is not None else ContentionChoice(),
    )


def direction(args: argparse.Namespace) -> str:
    """Return which graphs are wanted."""
    if args.direction not in DIRECTIONS:
        raise InputError(
            f"--direction: expected forward, backward or both; found {args.direction!r}"
        )
    return str(args.direction)


def search_choice(args: argparse.Namespace) -> SearchChoice:
    """Return the caps and the options of the search."""
    defaults = SolveOptions()
    bucket_cap = (
        parse_optional_bytes(args.bucket_cap, "--bucket-cap")
        if args.bucket_cap is not None
        else None
    )
    in_flight_cap = (
        parse_optional_bytes(args.in_flight_cap, "--in-flight-cap")
        if args.in_flight_cap is not None
        else None
    )
    return SearchChoice(
        caps=Caps(
            bucket_cap_bytes=bucket_cap,
            max_topo_span=(
                parse_optional_count(args.max_topo_span, "--max-topo-span")
                if args.max_topo_span is not None
                else None
            ),
            max_prefetch=(
                parse_optional_count(args.max_prefetch, "--max-prefetch")
                if args.max_prefetch is not None
                else None
            ),
            in_flight_cap_bytes=in_flight_cap,
            max_compute_move=_compute_move(args),
        ),
        memory_cap=parse_memory_cap(args.memory_cap) if args.memory_cap is not None else None,
        options=SolveOptions(
            time_slack=(
                parse_share(args.time_slack, "--time-slack")
                if args.time_slack is not None
                else defaults.time_slack
            ),
            budget=(
                parse_number(args.budget, "--budget")
                if args.budget is not None
                else defaults.budget
            ),
            seed=parse_count(args.seed, "--seed") if args.seed is not None else defaults.seed,
        ),
    )


def _compute_move(args: argparse.Namespace) -> int | None:
    """Return how far compute may move; the MILP keeps it as captured."""
    if str(getattr(args, "solver", "")).startswith("milp"):
        if args.max_compute_move not in (None, "0"):
            raise InputError(
                "--max-compute-move: the milp keeps compute as captured; expected 0, found"
                f" {args.max_compute_move!r}"
            )
        return 0
    text = getattr(args, "max_compute_move", None)
    return (
        DEFAULT_COMPUTE_MOVE if text is None else parse_optional_count(text, "--max-compute-move")
    )


def scenario_choice(args: argparse.Namespace) -> ScenarioOptions | None:
    """Return the scenarios that are asked for; ``None`` for none."""
    if args.scenarios is None:
        for flag, value in (("--noise", args.noise), ("--robust", args.robust)):
            if value is not None:
                raise InputError(
                    f"{flag}: it says which scenarios count; state how many with --scenarios"
                )
        return None
    if str(getattr(args, "solver", "")).startswith("milp"):
        raise InputError(
            "--scenarios: the milp solves for the costs as they are; leave --solver out"
        )
    given = {
        "noise": parse_number(args.noise, "--noise") if args.noise is not None else None,
        "measure": args.robust,
    }
    return ScenarioOptions(
        count=parse_count(args.scenarios, "--scenarios", least=1),
        **{name: value for name, value in given.items() if value is not None},
    )


def plan_choice(args: argparse.Namespace) -> Plan:
    """Return the user's plan; one without rules where there is none."""
    return load_plan(args.plan) if args.plan is not None else Plan()


def milp_choice(args: argparse.Namespace) -> MilpOptions | None:
    """Return how the MILP is solved; ``None`` where CP-SAT and the search solve."""
    name, colon, solver_name = str(args.solver).partition(":")
    if name == "cp-sat" and not colon:
        if args.time_limit is not None:
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

    defaults = MilpOptions()
    chosen = MilpOptions(
        solver_name=solver_name or defaults.solver_name,
        time_limit_s=(
            parse_number(args.time_limit, "--time-limit")
            if args.time_limit is not None
            else defaults.time_limit_s
        ),
    )
    check_solver(chosen.solver_name)
    return chosen


def out_dir(args: argparse.Namespace, default: str) -> Path:
    """Return the directory for output files."""
    return Path(args.out) if args.out is not None else Path("apsched-out") / default


def _count(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_count(text, flag, least=1)


def with_buckets(plan: Plan, asked: str | None, graphs: Sequence[LoadedGraph]) -> Plan:
    """Return ``plan`` with the buckets that are ``asked`` for: ``none``, ``block``, or a file with
    an entry a line.
    """
    if asked is None:
        return plan
    from apsched.problem.plan.module_buckets import NO_BUCKETS, ModuleBuckets, user_buckets
    from apsched.solver.baselines import block_labels

    if asked == "none":
        return Plan((*plan.rules, *NO_BUCKETS.rules))
    labels: dict[str, str] = {}
    for graph in graphs:
        labels = block_labels(graph.problem) | labels
    labels.pop("", None)
    if not labels:
        raise InputError(
            "--buckets: expected collectives that serve parameters with names, found none; leave"
            " it out"
        )
    if asked == "block":
        buckets = {
            label: tuple(name for name in labels if labels[name] == label)
            for label in dict.fromkeys(labels.values())
        }
        made = ModuleBuckets(buckets=buckets)
    else:
        made = user_buckets(_entries(asked), list(labels))
    return Plan((*plan.rules, *made.plan([graph.problem for graph in graphs]).rules))


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
