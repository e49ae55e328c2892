"""Lower bounds on step time that hold where compute may move; proofs in ``docs/formulation.md``.

Only the dependences and the cap on moves restrict the order of the compute. Jobs are compute and
launches on the compute stream, and transfers on the streams of their groups. The head of a job is
the earliest begin of its item from the beginning, its tail the same from the end, with time
reversed.

    (V1)  begin of an item >= t + time that its ancestors that cannot begin before t take on any one
          stream + least time that follows any of them; >= end of each item before it
    (V2)  a node comes before another if it is its ancestor, or was captured more than twice the cap
         on moves before it
    (V3)  step time >= min head + sum of ticks + min tail of any jobs that share a stream
    (V4)  jobs of the compute stream: compute; of collectives their least launch, copies, prologue
         and epilogue
    (V5)  jobs of a group's stream: transfers at the least rate of any bucket, or alone
    (V6)  the rows of the LP: all of the compute stream, and the sets for which (V3) is longest,
         weighed against each other
    (V7)  buckets weighed along a chain of items that follow each other in every order, as along
         paths where the order is fixed
    (V8)  step time >= compute before the last reduction + its transfer + sum over others of its
          stream of the lesser of the compute that only they need and their transfer; collectives
          on the path before it are weighed in, as far as compute cannot hide them
    (V9)  stages of compute of two chains on one machine, each with a transfer behind it
    (V10) buckets weighed along a chain of compute nodes; other compute counts that runs before the
         launches and behind the waits of a path

A memory cap need not force in another order the places that it forces in the captured one, so no
such place enters.
"""

from dataclasses import dataclass

import numpy as np

from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.items import items_of
from apsched.solver.bounds.any_order.jobs import (
    Ends,
    Loose,
    Work,
    compute_jobs,
    jobs_of_streams,
    tail_of_main,
)
from apsched.solver.bounds.any_order.one_machine import critical_jobs
from apsched.solver.bounds.linear_program import Costs, Row, decidable, lagrangian
from apsched.solver.bounds.step_time import TimeBound, least_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class InAnyOrder:
    """A problem as the bounds for every order of the compute see it."""

    instance: Instance
    """With copies for nothing where buckets may be coalesced; its arrays are as captured."""
    loose: Loose
    ends: Ends
    costs: Costs
    way: Ints
    """Items of the longest way, ascending."""


def loose_program(instance: Instance, orders: Orders, costs: Costs) -> Loose:
    """Return the facts about ``problem`` that hold for every order of its compute."""
    arrays = instance.arrays
    return Loose(
        items=items_of(arrays, orders),
        compute_ticks=arrays.compute_ticks,
        work=_least(instance, costs),
        stream=arrays.stream,
        on_path=arrays.on_path,
        copied_out=arrays.kind == ALL_GATHER,
        streams=instance.problem.streams,
    )


def _least(instance: Instance, costs: Costs) -> Work:
    arrays = instance.arrays
    copies = (costs.copy_in + costs.copy_out).astype(np.int64)
    main = np.where(arrays.bucketable, np.minimum(arrays.launch_ticks, copies), arrays.launch_ticks)
    rate = np.where(arrays.bucketable, np.minimum(costs.rate, costs.transfer), costs.transfer)
    return Work(
        prologue=np.where(
            arrays.bucketable, arrays.prologue_ticks - arrays.cast_ticks, arrays.prologue_ticks
        ),
        launch=least_launch(instance),
        main=main,
        epilogue=arrays.epilogue_ticks,
        transfer=arrays.transfer_ticks,
        load=rate.astype(np.int64),
    )


def weighed(at: InAnyOrder) -> TimeBound:
    """Return the bound that weighs launches and copies against transfers."""
    return TimeBound(ticks=lagrangian(_rows(at)), source=BoundSource.WEIGHED)


def _rows(at: InAnyOrder) -> list[Row]:
    """Return the rows of the LP, (V6): of each stream all of it, and the set for which it is
    longest.
    """
    loose, ends, costs = at.loose, at.ends, at.costs
    compute_ticks, copies = loose.compute_ticks, costs.copy_in + costs.copy_out
    whole_alone = costs.launch + costs.prologue + costs.epilogue
    rows = [
        Row(
            float(compute_ticks.sum()), whole_alone, copies + costs.prologue_shared + costs.epilogue
        )
    ]
    jobs = compute_jobs(loose, ends)
    _, head, tail = critical_jobs(jobs.head, jobs.tail, jobs.ticks)
    compute_order = (ends.head_of_compute >= head) & (ends.tail_of_compute >= tail)
    critical = (ends.head >= head) & (tail_of_main(loose, ends) >= tail)
    rows.append(
        Row(
            float(head + tail + compute_ticks[compute_order].sum()),
            np.where(critical, costs.launch, 0.0),
            np.where(critical, copies, 0.0),
        )
    )
    for stream, jobs in jobs_of_streams(loose, ends).items():
        on_stream = loose.stream == stream
        _, head, tail = critical_jobs(jobs.head, jobs.tail, jobs.ticks)
        critical = on_stream & (ends.head + loose.work.launch >= head) & (ends.tail >= tail)
        rows.append(
            Row(
                float(head + tail),
                np.where(critical, costs.transfer, 0.0),
                np.where(critical, costs.rate, 0.0),
            )
        )
        least_head, least_tail = int(jobs.head.min()), int(jobs.tail.min())
        rows.append(
            Row(
                float(least_head + least_tail),
                np.where(on_stream, costs.transfer, 0.0),
                np.where(on_stream, costs.rate, 0.0),
            )
        )
    return decidable(at.instance.arrays, rows)
