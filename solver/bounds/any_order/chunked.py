"""An idealised bound for on-path collectives that are split, with the compute around them, in parts
that overlap.

Each part of a split node takes its share of the time. It follows the same part of each split
predecessor of the node, and each whole predecessor; a whole successor follows all parts. A part of
a collective costs the price of its own bytes, and a launch. Nothing else is lost: a matrix product
is as efficient in parts, and a launch of compute costs nothing. So this is no bound on schedules of
the program as it is, but on the best program that asynchronous tensor parallelism could make of it.
"""

from dataclasses import replace

import numpy as np

from apsched.problem.problem import Problem
from apsched.solver.arrays.problem_arrays import Bools, Ints
from apsched.solver.bounds.any_order.items import Items, rows_from
from apsched.solver.bounds.any_order.jobs import Loose, Work, bounds_of, ends_of
from apsched.solver.bounds.step_time import TimeBound


def chunked_bound(
    whole: Loose, problem: Problem, split: frozenset[int], num_parts: int
) -> TimeBound:
    """Return the bound with compute anywhere, and the nodes of ``split`` (compute, and starts on
    the path) in ``num_parts`` parts.

    ``whole`` has the facts about ``problem``.
    """
    split_compute = np.array([node in split for node in problem.captured_order], dtype=np.bool_)
    split_collective = np.array(
        [c.start in split and c.on_path and not c.bucketable for c in problem.collectives],
        dtype=np.bool_,
    )
    parts = _split(
        whole, split_compute, split_collective, num_parts, _price_of_part(problem, num_parts)
    )
    found = bounds_of(parts, ends_of(parts, None))
    return max(found, key=lambda bound: bound.ticks)


def _price_of_part(problem: Problem, num_parts: int) -> Ints:
    return np.array(
        [problem.keys[c.key].price(c.size_bytes // num_parts) for c in problem.collectives],
        dtype=np.int64,
    )


def _split(
    loose: Loose,
    split_compute: Bools,
    split_collective: Bools,
    num_parts: int,
    transfer_of_part: Ints,
) -> Loose:
    """Return ``loose`` with the parts of an item beside each other."""
    old = loose.items
    is_split = np.zeros(len(old), dtype=np.bool_)
    is_split[old.of_compute], is_split[old.of_collective] = split_compute, split_collective
    copies = np.where(is_split, num_parts, 1)
    compute = np.repeat(np.arange(len(split_compute)), copies[old.of_compute])
    collective = np.repeat(np.arange(len(split_collective)), copies[old.of_collective])
    work, whole = loose.work, ~split_collective[collective]
    ticks = np.where(split_compute, loose.compute_ticks // num_parts, loose.compute_ticks)
    return replace(
        loose,
        items=_parts(old, is_split, num_parts),
        compute_ticks=ticks[compute],
        work=Work(
            prologue=work.prologue[collective],
            launch=work.launch[collective],
            main=work.main[collective],
            epilogue=work.epilogue[collective],
            transfer=np.where(whole, work.transfer[collective], transfer_of_part[collective]),
            load=np.where(whole, work.load[collective], transfer_of_part[collective]),
        ),
        stream=loose.stream[collective],
        on_path=loose.on_path[collective],
        copied_out=loose.copied_out[collective],
    )


def _parts(old: Items, is_split: Bools, num_parts: int) -> Items:
    """Return the parts of the ``old`` items: part i of a split item follows part i of each split
    item before it, and each whole item; a whole item follows all parts.
    """
    copies = np.where(is_split, num_parts, 1)
    first = np.concatenate(([0], np.cumsum(copies)))

    def renumbered(items: Ints) -> Ints:
        begin = np.cumsum(copies[items]) - copies[items]
        numbers: Ints = np.repeat(first[items] - begin, copies[items]) + np.arange(
            int(copies[items].sum())
        )
        return numbers

    later, earlier = np.repeat(np.arange(len(old)), np.diff(old.before_begin)), old.before_list
    pairs: list[tuple[Ints, Ints]] = []
    for i in range(num_parts):
        for j in range(num_parts):
            together = is_split[later] & is_split[earlier] & (i != j)
            exists = (i < copies[later]) & (j < copies[earlier]) & ~together
            pairs.append((first[later[exists]] + i, first[earlier[exists]] + j))
    begin, before = rows_from(
        np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs]), int(first[-1])
    )
    place = np.full(int(first[-1]), -1, dtype=np.int64)
    of_compute = renumbered(old.of_compute)
    place[of_compute] = np.arange(len(of_compute))
    return Items(
        of_compute=of_compute,
        of_collective=renumbered(old.of_collective),
        before_begin=begin,
        before_list=before,
        place=place,
    )
