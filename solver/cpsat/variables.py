"""Variables of the CP-SAT model: one dictionary per symbol. The mathematics is in
``docs/formulation.md``.

Two axes. *Position* is the place in the total order: compute node k stands at (k+1)·W, where W is
more than all steps of all units, the inputs at 0 and the output at (m+1)·W. *Time* is ticks on the
compute stream. A unit occupies an interval on both.
"""

from dataclasses import dataclass, field, replace
from itertools import combinations

from ortools.sat.python import cp_model

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.schedule import StepKind
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import ALL_GATHER, ProblemArrays
from apsched.solver.arrays.relaxed import without_places
from apsched.solver.cpsat.compute_order import ComputeOrder, as_captured

Unit = tuple[StepKind, int]
"""(kind of step, head of the bucket) or (copy_out, collective)."""
Linear = cp_model.LinearExpr | cp_model.IntVar | int


@dataclass(slots=True)
class UnitVariables:
    """A movable unit: where it stands and when it runs."""

    present: cp_model.BoolVarT
    first: cp_model.IntVar
    """u: its first position."""
    last: cp_model.IntVar
    """v: its last position."""
    begin: cp_model.IntVar
    """s: ticks."""
    end: cp_model.IntVar
    """e: ticks."""


@dataclass(slots=True)
class Variables:
    """All symbols of the formulation."""

    model: cp_model.CpModel
    problem: Problem
    arrays: ProblemArrays
    caps: Caps
    horizon_ticks: int
    compute_order: ComputeOrder
    position_step: int
    """W"""
    joins: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """x[c, h]: collective c is in the bucket headed by h (its lowest member)."""
    alone: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """y[c]: c is a bucket of one."""
    several: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """z[h]: h heads a flat bucket of two or more."""
    coalesced: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """w[h]: h heads a coalesced bucket; only where it can."""
    carried: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """j[c, h]: c is in the coalesced bucket headed by h."""
    loose: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """l[c]: c has memory of its own: it is alone, or in a coalesced bucket."""
    units: dict[Unit, UnitVariables] = field(default_factory=dict)
    before: dict[tuple[Unit, Unit], cp_model.IntVar] = field(default_factory=dict)
    """b[i, j]: unit i stands before unit j (where both are present)."""
    after_compute: dict[tuple[Unit, int], cp_model.IntVar] = field(default_factory=dict)
    """a[i, k]: unit i stands after compute node k."""
    order: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """o[A, B]: block A of the compute stands before block B; only where the model decides their
    order.
    """
    places: list[cp_model.IntVar] = field(default_factory=list)
    """pos(k) of each compute node, where the model decides their order."""
    compute_begin: list[cp_model.IntVar] = field(default_factory=list)
    transfer_begin: dict[int, cp_model.IntVar] = field(default_factory=dict)
    transfer_end: dict[int, cp_model.IntVar] = field(default_factory=dict)
    transfer_ticks: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """tau[h]"""
    copy_in_ticks: dict[int, cp_model.IntVar] = field(default_factory=dict)
    attached_position: dict[int, cp_model.IntVar] = field(default_factory=dict)
    """p[f]: position of a prologue, start, wait or epilogue node (a member's start: its
    copy-in).
    """
    step_time: cp_model.IntVar = field(init=False)
    peak_blocks: cp_model.IntVar = field(init=False)
    """Peak of live bytes, in blocks of the allocator, without the bytes that the caller keeps."""

    def members(self, h: int) -> list[int]:
        """Return the collectives that may join the bucket headed by ``h``, itself included."""
        return [c for c, head in self.joins if head == h]

    def heads(self, c: int) -> list[int]:
        """Return the heads whose bucket ``c`` may join, itself included."""
        return [head for member, head in self.joins if member == c]

    def coalesced_literal(self, h: int) -> list[cp_model.IntVar]:
        """Return w[h], where h can head a coalesced bucket."""
        return [self.coalesced[h]] if h in self.coalesced else []

    def compute_position(self, k: int) -> cp_model.IntVar | int:
        """Return the position of compute node ``k``; the output is compute node m."""
        return self.places[k] if k < len(self.places) else (k + 1) * self.position_step

    def stands_before(self, a: int, b: int) -> cp_model.BoolVarT | int:
        """Return whether block ``a`` stands before block ``b``: the literal, or a number where it
        is known.
        """
        assert self.compute_order.free is not None
        if (a, b) in self.order:
            return self.order[a, b]
        if (b, a) in self.order:
            return self.order[b, a].negated()
        return int(a in self.compute_order.free.sooner[b])

    @property
    def last_position(self) -> int:
        """Position of the output."""
        return (len(self.arrays.compute_ticks) + 1) * self.position_step

    def gathers(self, c: int) -> bool:
        """Whether ``c`` is an all-gather, so that a bucket copies it out."""
        return bool(self.arrays.kind[c] == ALL_GATHER)


def create_variables(
    instance: Instance,
    horizon_ticks: int,
    compute_order: ComputeOrder | None = None,
) -> Variables:
    """Return all variables with their domains, and the order literals of every pair of units; with
    ``compute_order`` of blocks, too.
    """
    arrays = instance.arrays
    attached = len(arrays.attached_ticks)
    v = Variables(
        model=cp_model.CpModel(),
        problem=instance.problem,
        arrays=arrays,
        caps=instance.caps,
        horizon_ticks=horizon_ticks,
        compute_order=compute_order or as_captured(arrays),
        position_step=attached + 2 * len(arrays.kind) + 2,
    )
    _create_buckets(v, instance)
    for c in range(len(arrays.kind)):
        _create_units(v, c)
    model = v.model
    for i, j in combinations(v.units, 2):
        v.before[i, j] = model.new_bool_var(f"b[{i},{j}]")
    num_compute = len(arrays.compute_ticks)
    for unit in v.units:
        for k in range(num_compute):
            v.after_compute[unit, k] = model.new_bool_var(f"a[{unit},{k}]")
    if v.compute_order.free is not None:
        for a, b in v.compute_order.free.pairs():
            v.order[a, b] = model.new_bool_var(f"o[{a},{b}]")
        v.places = [
            model.new_int_var(v.position_step, num_compute * v.position_step, f"pos[{k}]")
            for k in range(num_compute)
        ]
    v.compute_begin = [
        model.new_int_var(0, horizon_ticks, f"s[{k}]") for k in range(num_compute + 1)
    ]
    for f in range(attached):
        v.attached_position[f] = model.new_int_var(0, v.last_position, f"p[{f}]")
    v.step_time = model.new_int_var(0, horizon_ticks, "step_time")
    return v


def _create_buckets(v: Variables, instance: Instance) -> None:
    """Create the literals of buckets: who joins whom, in which form."""
    arrays, model = v.arrays, v.model
    pricer = Pricer(
        instance
        if v.compute_order.free is None
        else replace(instance, arrays=without_places(arrays))
    )
    for h in range(len(arrays.kind)):
        for c in range(h, len(arrays.kind)):
            if c == h or pricer.allowed((h, c), instance.caps):
                v.joins[c, h] = model.new_bool_var(f"x[{c},{h}]")
    for c, h in v.joins:
        if c != h and h not in v.coalesced and arrays.coalesces[c] and arrays.coalesces[h]:
            v.coalesced[h] = model.new_bool_var(f"w[{h}]")
    for c, h in v.joins:
        if h in v.coalesced and arrays.coalesces[c]:
            v.carried[c, h] = model.new_bool_var(f"j[{c},{h}]")


def _create_units(v: Variables, c: int) -> None:
    """Create the units of the collective ``c``, their positions and times, and its transfer."""
    model, horizon_ticks = v.model, v.horizon_ticks
    v.alone[c] = model.new_bool_var(f"y[{c}]")
    v.several[c] = model.new_bool_var(f"z[{c}]")
    v.loose[c] = (
        model.new_bool_var(f"l[{c}]")
        if any((c, h) in v.carried for h in v.heads(c))
        else v.alone[c]
    )
    for what, present in _units_of(v, c):
        v.units[what, c] = UnitVariables(
            present=present,
            first=model.new_int_var(1, v.last_position - 1, f"u[{what},{c}]"),
            last=model.new_int_var(1, v.last_position - 1, f"v[{what},{c}]"),
            begin=model.new_int_var(0, horizon_ticks, f"s[{what},{c}]"),
            end=model.new_int_var(0, horizon_ticks, f"e[{what},{c}]"),
        )
    v.transfer_ticks[c] = model.new_int_var(0, horizon_ticks, f"T[{c}]")
    v.transfer_begin[c] = model.new_int_var(0, horizon_ticks, f"tb[{c}]")
    v.transfer_end[c] = model.new_int_var(0, horizon_ticks, f"te[{c}]")
    v.copy_in_ticks[c] = model.new_int_var(0, horizon_ticks, f"ci[{c}]")


def _units_of(v: Variables, c: int) -> list[tuple[StepKind, cp_model.BoolVarT]]:
    """Return the units that exist because of ``c``, with their presence literals."""
    units: list[tuple[StepKind, cp_model.BoolVarT]] = [
        (StepKind.START, v.joins[c, c]),
        (StepKind.WAIT, v.joins[c, c]),
    ]
    if len(v.members(c)) > 1:
        units.append((StepKind.COPY_IN, v.several[c]))
    if v.gathers(c) and (len(v.members(c)) > 1 or len(v.heads(c)) > 1):
        units.append((StepKind.COPY_OUT, v.loose[c].negated()))
    return units
