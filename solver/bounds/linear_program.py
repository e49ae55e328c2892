"""A bound by linear programming: launches, copies and transfers weighed against each other.

A collective has other costs alone than in a bucket: alone it pays its own latency on the stream and
a launch on the compute stream; in a bucket only its bytes on the stream, but copies on the compute
stream. Each of the bounds of ``apsched.solver.bounds.step_time`` takes the cheaper of the two for
itself; no schedule can take both. With y_c in [0, 1] (in a bucket):

    min z   s.t.   z >= const_i + sum_c ((1 - y_c) alone_ic + y_c shared_ic)    for every row i

    (R1)  the compute stream:      sum d;  alone: launch + own;  shared: copies + own
    (R2)  a stream, all of it:     head + tail;  alone: T;  shared: bytes * least rate
    (R3)  a stream's gathers needed at or before k, then the compute order from k on:  alone: T;
          shared: bytes * least rate;  gathers of the stream needed later, shared: min(copy-out,
          slope * bytes), since a copy-out before k needs its bytes transferred before k; reductions
          ready after k: alone: launch + own;  shared: copy-in + own
    (R4)  the compute order before k, then a stream's reductions ready at or after slot k:  the
          largest of them, the others alone: T, shared: slope * bytes;  gathers needed before k: as
          in (R1);  reductions of the stream ready before: alone: min(launch, T), shared:
          min(copy-in, slope * bytes), since each is launched before slot k or transferred after it

The bound is the Lagrangian of the weights that the LP finds, evaluated again, so that it holds for
any tolerance of the LP.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from ortools.linear_solver import pywraplp

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints, ProblemArrays
from apsched.solver.bounds.step_time import TimeBound, least_rate, least_slope

Floats = npt.NDArray[np.float64]

"""The argument of such a bound."""
_MOST_ROWS = 24
"""Gaps tried for each of (R3) and (R4) on each stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost of each collective alone and in a bucket; own work is its prologue (in a bucket
    without its cast) and epilogue.
    """

    launch: Floats
    prologue: Floats
    prologue_shared: Floats
    epilogue: Floats
    copy_in: Floats
    copy_out: Floats
    transfer: Floats
    rate: Floats
    """bytes * least rate of any bucket."""
    slope: Floats
    """bytes * least slope of the price."""


@dataclass(frozen=True, slots=True)
class Row:
    """Step time >= constant + the cost of each collective here, alone or in a bucket, in ticks."""

    constant: float
    alone: Floats
    shared: Floats


def lp_bound(instance: Instance) -> TimeBound:
    """Return the Lagrangian bound of all rows."""
    return TimeBound(ticks=lagrangian(rows_of(instance)), source=BoundSource.WEIGHED)


def lagrangian(rows: list[Row]) -> int:
    """Return the bound that weights of ``rows`` give, in ticks; the weights are the duals of the
    LP.
    """
    constants = np.array([r.constant for r in rows])
    alone, shared = np.array([r.alone for r in rows]), np.array([r.shared for r in rows])
    weights = weights_of(constants, alone, shared)
    bound = weights @ constants + np.minimum(weights @ alone, weights @ shared).sum()
    return int(bound * (1 - 1e-9))


def rows_of(instance: Instance) -> list[Row]:
    """Return all rows, the compute stream's first."""
    return decidable(instance.arrays, _rows(instance.arrays, costs_of(instance)))


def decidable(arrays: ProblemArrays, rows: list[Row]) -> list[Row]:
    """Return ``rows`` with the same cost on both sides for a collective that cannot be in a bucket,
    or must be.
    """
    grouped = arrays.group >= 0
    return [
        Row(
            r.constant,
            np.where(grouped, r.shared, r.alone),
            np.where(arrays.bucketable, r.shared, r.alone),
        )
        for r in rows
    ]


def costs_of(instance: Instance) -> Costs:
    """Return the cost of each collective alone and in a bucket; in a closed group of the plan, its
    share of that bucket.
    """
    return _in_closed_groups(instance, costs_in_any_bucket(instance))


def _in_closed_groups(instance: Instance, costs: Costs) -> Costs:
    """Return ``costs`` with the exact price of every bucket that the user's plan closes, each
    member bearing its share by bytes.
    """
    arrays = instance.arrays
    copy_in, rate = costs.copy_in.copy(), costs.rate.copy()
    for number in np.unique(arrays.group[arrays.closed]):
        members = np.nonzero(arrays.group == number)[0]
        key = instance.problem.keys[int(arrays.key[members[0]])]
        copied, size = arrays.copied_bytes[members], arrays.size_bytes[members]
        copy_in[members] = (
            (instance.problem.copy_price(int(copied.sum())) + key.launch_ticks)
            * copied
            / max(int(copied.sum()), 1)
        )
        rate[members] = key.price(int(size.sum())) * size / max(int(size.sum()), 1)
    return replace(costs, copy_in=copy_in, rate=rate)


def costs_in_any_bucket(instance: Instance) -> Costs:
    """Return the cost of each collective alone, and its least cost in any bucket, for any plan of
    the user.
    """
    problem, arrays = instance.problem, instance.arrays
    copy_rate = least_rate(problem.copy_price, None)
    rate, slope = np.zeros(len(problem.keys)), np.zeros(len(problem.keys))
    for k, key in enumerate(problem.keys):
        sizes = arrays.size_bytes[(arrays.key == k) & arrays.bucketable]
        if len(sizes):
            largest = int(sizes.sum())
            if instance.caps.bucket_cap_bytes is not None:
                largest = min(largest, max(instance.caps.bucket_cap_bytes, int(sizes.max())))
            rate[k], slope[k] = least_rate(key.price, largest), least_slope(key.price)
    prologue = arrays.prologue_ticks.astype(np.float64)
    return Costs(
        launch=arrays.launch_ticks.astype(np.float64),
        prologue=prologue,
        prologue_shared=prologue - arrays.cast_ticks,
        epilogue=arrays.epilogue_ticks.astype(np.float64),
        copy_in=arrays.copied_bytes.astype(np.float64) * copy_rate,
        copy_out=np.where(arrays.kind == ALL_GATHER, arrays.copy_out_ticks, 0).astype(np.float64),
        transfer=arrays.transfer_ticks.astype(np.float64),
        rate=arrays.size_bytes * rate[arrays.key],
        slope=arrays.size_bytes * slope[arrays.key],
    )


def _rows(arrays: ProblemArrays, c: Costs) -> list[Row]:
    """Return all rows: (R1); for each stream (R2) and a sample of the others."""
    num_compute = len(arrays.compute_ticks)
    alone, shared = (
        c.prologue + c.epilogue + c.launch,
        c.prologue_shared + c.epilogue + c.copy_in + c.copy_out,
    )
    rows = [Row(float(arrays.compute_ticks.sum()), alone, shared)]
    before = arrays.time_before.astype(np.float64)
    after = before[-1] - before
    gathers, reductions = arrays.gathers, arrays.reductions
    for stream in range(arrays.num_streams):
        on_stream = arrays.stream == stream
        if not on_stream.any():
            continue
        head = before[np.minimum(arrays.ready_slot[on_stream], num_compute)].min()
        tail = after[np.minimum(arrays.need_slot[on_stream], num_compute)].min()
        rows.append(
            Row(head + tail, np.where(on_stream, c.transfer, 0.0), np.where(on_stream, c.rate, 0.0))
        )
        for k in _sample(arrays.need_slot[on_stream & gathers]):
            rows.append(_gathers_row(arrays, c, on_stream & gathers, reductions, int(k), after))
        for k in _sample(arrays.ready_slot[on_stream & reductions]):
            rows.append(_reductions_row(arrays, c, on_stream & reductions, int(k), before))
    return rows


def _gathers_row(
    arrays: ProblemArrays,
    c: Costs,
    gathers: npt.NDArray[np.bool_],
    reductions: npt.NDArray[np.bool_],
    k: int,
    after: Floats,
) -> Row:
    """Return (R3) for compute node ``k``."""
    sooner, later = gathers & (arrays.need_slot <= k), gathers & (arrays.need_slot > k)
    behind = reductions & (arrays.ready_slot > k)
    alone = np.where(sooner, c.transfer, 0.0) + np.where(behind, c.launch + c.epilogue, 0.0)
    shared = np.where(sooner, c.rate, 0.0) + np.where(later, np.minimum(c.copy_out, c.slope), 0.0)
    return Row(float(after[k]), alone, shared + np.where(behind, c.copy_in + c.epilogue, 0.0))


def _reductions_row(
    arrays: ProblemArrays, c: Costs, reductions: npt.NDArray[np.bool_], k: int, before: Floats
) -> Row:
    """Return (R4) for slot ``k``."""
    last, sooner = reductions & (arrays.ready_slot >= k), reductions & (arrays.ready_slot < k)
    needed = (arrays.kind == ALL_GATHER) & ~arrays.on_path & (arrays.need_slot < k)
    largest = int(np.argmax(np.where(last, c.transfer, -1.0)))
    last = last.copy()
    last[largest] = False
    alone = np.where(last, c.transfer, 0.0) + np.where(
        sooner, np.minimum(c.launch, c.transfer), 0.0
    )
    shared = np.where(last, c.slope, 0.0) + np.where(sooner, np.minimum(c.copy_in, c.slope), 0.0)
    return Row(
        float(before[k] + c.transfer[largest] - 1),
        alone + np.where(needed, c.launch + c.prologue, 0.0),
        shared + np.where(needed, c.copy_in + c.copy_out + c.prologue_shared, 0.0),
    )


def _sample(slots: Ints) -> Ints:
    """Return at most _MOST_ROWS of the distinct ``slots``, the first and the last among them."""
    distinct = np.unique(slots)
    if len(distinct) <= _MOST_ROWS:
        return distinct
    chosen: Ints = distinct[
        np.unique(np.linspace(0, len(distinct) - 1, _MOST_ROWS).round().astype(np.int64))
    ]
    return chosen


def weights_of(constants: Floats, alone: Floats, shared: Floats) -> Floats:
    """Return the weights of the rows, which sum to 1: the duals of the LP."""
    first = np.zeros(len(constants))
    first[0] = 1.0
    scale = float(max(constants.max(), 1.0))
    solver = pywraplp.Solver.CreateSolver("GLOP")
    step_time = solver.NumVar(0, solver.infinity(), "z")
    difference = (shared - alone) / scale
    used = np.nonzero(np.abs(difference).max(axis=0) > 0)[0]
    shares = [solver.NumVar(0, 1, "") for _ in used]
    rows = []
    for i in range(len(constants)):
        row = solver.Constraint((constants[i] + alone[i].sum()) / scale, solver.infinity())
        row.SetCoefficient(step_time, 1.0)
        for share, value in zip(shares, difference[i, used].tolist(), strict=True):
            if value:
                row.SetCoefficient(share, -value)
        rows.append(row)
    solver.Minimize(step_time)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return first
    duals: Floats = np.array([max(row.dual_value(), 0.0) for row in rows], dtype=np.float64)
    total = float(duals.sum())
    return duals / total if total > 0 else first
