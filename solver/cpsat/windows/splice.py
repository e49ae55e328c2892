"""The way between a program and a window of it: the window's part as a hint, and the whole program
with a solved window put back.
"""

import numpy as np

from apsched.solver.arrays.partition import Pricer
from apsched.solver.cpsat.windows.subproblem import WindowView
from apsched.solver.cpsat.windows.subproblem_arrays import forms_of, forms_with
from apsched.solver.program.program import COPY_IN, COPY_OUT, LAUNCH, NODE, WAIT, Program


def hint(view: WindowView) -> Program:
    """Return the window's part of the program, as a program of the small problem."""
    free, place = view.window.free, {c: j for j, c in enumerate(view.window.free)}
    buckets = {
        b: tuple(place[c] for c in view.program.partition.buckets[b])
        for b in sorted(view.free_buckets)
    }
    pinned_bucket = {
        int(view.program.argument[i]): len(free) + j for j, (i, _, _) in enumerate(view.pinned)
    }
    groups = [*buckets.values(), *((j,) for j in pinned_bucket.values())]
    index = {b: k for k, b in enumerate([*buckets, *pinned_bucket])}
    order: list[tuple[int, int]] = []
    segment = 0
    for i in range(view.window.first, view.window.past):
        operation, argument = int(view.program.operation[i]), int(view.program.argument[i])
        if i in view.slot_of_operation:
            if operation == COPY_OUT:
                order.append((operation, place[argument]))
            elif argument in index:
                order.append((operation, index[argument]))
        elif segment < len(view.segments) and view.segments[segment][0] == i:
            order.append((NODE, segment))
            segment += 1
    order += [(WAIT, index[b]) for b in pinned_bucket]
    array = np.array(order, dtype=np.int64).reshape(-1, 2)
    partition = Pricer(view.instance).partition(
        groups, forms_of(view.program.partition, free, len(view.arrays.kind))
    )
    return Program(
        partition=partition,
        operation=np.ascontiguousarray(array[:, 0]),
        argument=np.ascontiguousarray(array[:, 1]),
    )


def spliced(view: WindowView, small: Program) -> Program:
    """Return the whole program with the window's operations replaced by those of ``small``."""
    free, old = view.window.free, view.program.partition.buckets
    fresh = [
        tuple(free[j] for j in members)
        for members in small.partition.buckets
        if members[0] < len(free)
    ]
    kept = [b for b in range(len(old)) if b not in view.free_buckets]
    buckets = [*(old[b] for b in kept), *fresh]
    new_index = {b: k for k, b in enumerate(kept)}
    fresh_index = {tuple(sorted(m)): len(kept) + k for k, m in enumerate(fresh)}
    order: list[tuple[int, int]] = []

    def keep(i: int) -> None:
        operation, argument = int(view.program.operation[i]), int(view.program.argument[i])
        order.append(
            (operation, argument if operation in (NODE, COPY_OUT) else new_index[argument])
        )

    for i in range(view.window.first):
        keep(i)
    for operation, argument in zip(small.operation.tolist(), small.argument.tolist(), strict=True):
        if operation == NODE:
            for i in view.segments[argument]:
                keep(i)
        elif operation == COPY_OUT:
            order.append((COPY_OUT, free[argument]))
        elif operation != COPY_IN:  # its launch takes the copy-in with it
            members = small.partition.buckets[argument]
            if members[0] < len(free):
                bucket = fresh_index[tuple(sorted(free[j] for j in members))]
                order.append((WAIT if operation == WAIT else LAUNCH, bucket))
            elif operation == LAUNCH:
                keep(view.pinned[members[0] - len(free)][0])
    for i in range(view.window.past, len(view.program.operation)):
        keep(i)
    array = np.array(order, dtype=np.int64)
    partition = view.pricer.partition(
        buckets, forms_with(view.program.partition, free, small.partition)
    )
    return Program(
        partition=partition,
        operation=np.ascontiguousarray(array[:, 0]),
        argument=np.ascontiguousarray(array[:, 1]),
    )
