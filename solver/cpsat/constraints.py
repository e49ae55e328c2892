"""Constraints of the CP-SAT model, numbered as in ``docs/formulation.md``: one function, one
formula.

Symbols. c, d: collectives; h, g: heads of buckets; i, j: units; k: compute nodes, m of them. x[c,h]
joins, y[c] alone, z[h] heads a flat bucket, w[h] a coalesced one, j[c,h] x and w, l[c] memory of
its own; u/v first and last position and s/e begin and end in ticks, of a unit; a[i,k]: unit i after
compute node k; b[i,j]: unit i before unit j; o[A,B]: block A before block B; s[k] begin of a
compute node; tb/te/tau begin, end and length of a transfer; theta copy-in ticks; p[f] position of a
attached node; Z step time, M peak; size[c], cp[c], in[c], out[c]: bytes that the price depends on,
that a copy-in counts, of input and output; member[c]: ticks for it in a coalesced bucket.
"""

from itertools import combinations

from ortools.sat.python import cp_model

from apsched.schedule.schedule import StepKind
from apsched.solver.cpsat.constraints_buckets import forms, prices
from apsched.solver.cpsat.constraints_memory import in_flight, memory
from apsched.solver.cpsat.constraints_order import order_of_the_compute, prefetch_in_any_order
from apsched.solver.cpsat.constraints_plan import plan
from apsched.solver.cpsat.variables import Linear, Unit, Variables

Literals = list[cp_model.BoolVarT]


def membership(v: Variables) -> None:
    """(1) Membership: every collective is in exactly one bucket.

    for all c:  sum_h x[c,h] = 1
    """
    for c in v.alone:
        v.model.add_exactly_one(v.joins[c, h] for h in v.heads(c)).with_name(f"membership[{c}]")


def heads(v: Variables) -> None:
    """(2) Heads: the head of a bucket is alone or has several members, and only then may others
    join it.

    for all h:  x[h,h] = y[h] + z[h] + w[h],  x[c,h] <= z[h] + w[h] for c > h,  z[h], w[h] <=
    sum_{c>h} x[c,h]
    """
    for h in v.alone:
        others = [v.joins[c, h] for c in v.members(h) if c != h]
        either = [v.several[h], *v.coalesced_literal(h)]
        v.model.add(v.joins[h, h] == v.alone[h] + sum(either)).with_name(f"head[{h}]")
        for literal in others:
            if len(either) == 1:
                v.model.add_implication(literal, either[0])
            else:
                v.model.add_bool_or([literal.negated(), *either])
        for form in either:
            v.model.add_bool_or([*others, form.negated()])


def bucket_caps(v: Variables) -> None:
    """(3) Caps of a bucket: its bytes (where it has several members) and its topo-span, in ranks.

    for all h:  z[h], and w[h], imply sum_c size[c] x[c,h] <= bucket cap;  x[c,h] + x[d,h] <= 1
    where |rank[c] - rank[d]| > max span
    """
    arrays, caps = v.arrays, v.caps
    for h in v.alone:
        members = v.members(h)
        if caps.bucket_cap_bytes is not None:
            total = sum(int(arrays.size_bytes[c]) * v.joins[c, h] for c in members)
            for form in (v.several[h], *v.coalesced_literal(h)):
                v.model.add(total <= caps.bucket_cap_bytes).only_enforce_if(form).with_name(
                    f"bucket_cap[{h}]"
                )
        if caps.max_topo_span is not None:
            for c, d in combinations(members, 2):
                if abs(int(arrays.start_rank[c] - arrays.start_rank[d])) > caps.max_topo_span:
                    v.model.add_bool_or([v.joins[c, h].negated(), v.joins[d, h].negated()])


def unit_sizes(v: Variables) -> None:
    """(4) Size of a unit: it takes as many positions as it has steps, and at least as many ticks as
    it has work.

        for all units i present:  v[i] = u[i] + steps[i] - 1,  e[i] >= s[i] + work[i]

    prepare: prologues of all members without their casts, copy-in; start: (alone, coalesced:
    prologues,) launch; wait: epilogues of members that are not copied out; copy-out: the copy, the
    epilogue.
    """
    for (what, c), unit in v.units.items():
        steps, work = _steps_and_work(v, what, c)
        v.model.add(unit.last == unit.first + steps - 1).only_enforce_if(unit.present)
        v.model.add(unit.end >= unit.begin + work).only_enforce_if(unit.present)


def _steps_and_work(v: Variables, what: StepKind, c: int) -> tuple[Linear, Linear]:
    k = v.arrays
    if what is StepKind.COPY_IN:
        members = v.members(c)
        steps = 1 + sum(v.joins[d, c] * _prologue(v, d, several=True)[0] for d in members)
        return steps, v.copy_in_ticks[c] + sum(
            v.joins[d, c] * _prologue(v, d, several=True)[1] for d in members
        )
    if what is StepKind.START:
        steps = (
            1
            + v.alone[c] * _prologue(v, c)[0]
            + sum(v.carried[d, c] * _prologue(v, d)[0] for d in _carried(v, c))
        )
        alone = int(k.launch_ticks[c]) + _prologue(v, c)[1]
        shared = (v.several[c] + sum(v.coalesced_literal(c))) * int(k.bucket_launch_ticks[c])
        return steps, v.alone[c] * alone + shared + sum(
            v.carried[d, c] * _prologue(v, d)[1] for d in _carried(v, c)
        )
    if what is StepKind.COPY_OUT:
        return 1 + _epilogue(v, c)[0], int(k.copy_out_ticks[c]) + _epilogue(v, c)[1]
    if v.gathers(c):
        return (
            1
            + v.alone[c] * _epilogue(v, c)[0]
            + sum(v.carried[d, c] * _epilogue(v, d)[0] for d in _carried(v, c)),
            v.alone[c] * _epilogue(v, c)[1]
            + sum(v.carried[d, c] * _epilogue(v, d)[1] for d in _carried(v, c)),
        )
    return (
        1 + sum(v.joins[d, c] * _epilogue(v, d)[0] for d in v.members(c)),
        sum(v.joins[d, c] * _epilogue(v, d)[1] for d in v.members(c)),
    )


def _carried(v: Variables, h: int) -> list[int]:
    """Return the collectives that a coalesced bucket headed by h may hold."""
    return [c for c in v.members(h) if (c, h) in v.carried]


def _prologue(v: Variables, c: int, *, several: bool = False) -> tuple[int, int]:
    k = v.arrays
    attached = k.prologue_of(c)
    if several:
        attached = attached[attached != k.cast_attached[c]]
    return len(attached), int(k.attached_ticks[attached].sum())


def _epilogue(v: Variables, c: int) -> tuple[int, int]:
    k = v.arrays
    attached = k.epilogue_of(c)
    return len(attached), int(k.attached_ticks[attached].sum())


def compute_in_order(v: Variables) -> None:
    """(5) Compute order: compute keeps its dependences, and the step ends after the compute order,
    whose end is s[m], and after every unit.

    s[k] >= s[j] + d[j] for all j before k,  s[m] >= s[k] + d[k],  Z >= s[m],  Z >= e[i] for all
    units i present
    """
    ticks = v.arrays.compute_ticks.tolist()
    for k, before in enumerate(v.compute_order.before):
        for j in before:
            v.model.add(v.compute_begin[k] >= v.compute_begin[j] + ticks[j]).with_name(
                f"spine[{j},{k}]"
            )
        v.model.add(v.compute_begin[-1] >= v.compute_begin[k] + ticks[k])
    assert v.step_time is not None
    v.model.add(v.step_time >= v.compute_begin[-1])
    for unit in v.units.values():
        v.model.add(v.step_time >= unit.end).only_enforce_if(unit.present)


def unit_against_compute(v: Variables) -> None:
    """(6) Unit against compute order: a unit is before or after a compute node, in position and in
    time.

    a[i,k]:      u[i] > pos(k), s[i] >= s[k] + d[k]
    not a[i,k]:  v[i] < pos(k), e[i] <= s[k]
    a[i,k] implies a[i,j] for j before k
    """
    for (unit, k), after in v.after_compute.items():
        i = v.units[unit]
        position, ticks = v.compute_position(k), int(v.arrays.compute_ticks[k])
        v.model.add(i.first > position).only_enforce_if(i.present, after)
        v.model.add(i.begin >= v.compute_begin[k] + ticks).only_enforce_if(i.present, after)
        v.model.add(i.last < position).only_enforce_if(i.present, after.negated())
        v.model.add(i.end <= v.compute_begin[k]).only_enforce_if(i.present, after.negated())
        for j in v.compute_order.before[k]:
            v.model.add_implication(after, v.after_compute[unit, j])


def unit_against_unit(v: Variables) -> None:
    """(7) Unit against unit: one compute stream, one order, for every two units that are present.

    b[i,j]:  v[i] < u[j], e[i] <= s[j];   not b[i,j]:  v[j] < u[i], e[j] <= s[i]
    """
    for (i, j), literal in v.before.items():
        one, other = v.units[i], v.units[j]
        both: Literals = [one.present, other.present]
        v.model.add(one.last < other.first).only_enforce_if(*both, literal)
        v.model.add(one.end <= other.begin).only_enforce_if(*both, literal)
        v.model.add(other.last < one.first).only_enforce_if(*both, literal.negated())
        v.model.add(other.end <= one.begin).only_enforce_if(*both, literal.negated())


def _order(v: Variables, i: Unit, j: Unit) -> cp_model.BoolVarT:
    return v.before[i, j] if (i, j) in v.before else v.before[j, i].negated()


def bucket_sequence(v: Variables) -> None:
    """(8) Sequence of a bucket: prepare, start, wait, then the copy-out of every member.

    z[h] implies b[prepare h, start h];  b[start h, wait h];  x[c,h] implies b[wait h, copy-out c]
    """
    for h in v.alone:
        if (StepKind.COPY_IN, h) in v.units:
            v.model.add_implication(
                v.several[h], _order(v, (StepKind.COPY_IN, h), (StepKind.START, h))
            )
        v.model.add(_order(v, (StepKind.START, h), (StepKind.WAIT, h)) == 1)
        for c in v.members(h):
            if (StepKind.COPY_OUT, c) in v.units:
                v.model.add_implication(
                    v.joins[c, h], _order(v, (StepKind.WAIT, h), (StepKind.COPY_OUT, c))
                )


def readiness(v: Variables) -> None:
    """(9) Readiness: a bucket is prepared after all that its members are made of.

    x[c,h] implies, for i = prepare h and start h:  a[i, ready[c]-1],  and for every d whose result
    c depends on: b[wait g, i] where x[d,g],  b[copy-out d, i],  and not x[d,h]: no bucket holds an
    ancestor of a member
    """
    k = v.arrays
    for (c, h), joins in v.joins.items():
        awaited = [int(d) for d in k.awaited_by(c)]
        for unit in (StepKind.COPY_IN, h), (StepKind.START, h):
            if unit not in v.units or (
                unit[0] == StepKind.COPY_IN and c == h and len(v.members(h)) == 1
            ):
                continue
            for producer in v.compute_order.ready[c]:
                v.model.add_implication(joins, v.after_compute[unit, producer])
            for d in awaited:
                for head in v.heads(d):
                    if head == h:
                        v.model.add_bool_or(
                            [joins.negated(), v.joins[d, head].negated()]
                        )  # no bucket with an ancestor
                    else:
                        v.model.add_implication(
                            joins, _order(v, (StepKind.WAIT, head), unit)
                        ).only_enforce_if(v.joins[d, head])
                if (StepKind.COPY_OUT, d) in v.units:
                    v.model.add_implication(joins, _order(v, (StepKind.COPY_OUT, d), unit))


def need(v: Variables) -> None:
    """(10) Need: a result is there before the compute nodes that need it.

    for all k that need c:  x[c,h] implies not a[wait h, k];  not a[copy-out c, k]
    """
    for (c, h), joins in v.joins.items():
        for k in v.compute_order.needed[c]:
            v.model.add_implication(joins, v.after_compute[(StepKind.WAIT, h), k].negated())
            if (StepKind.COPY_OUT, c) in v.units:
                v.model.add(v.after_compute[(StepKind.COPY_OUT, c), k] == 0)


def transfers(v: Variables) -> None:
    """(11) Transfers: one begins after its launch; its wait ends after it.

    for all h with x[h,h]:  tb[h] >= e[start h],  te[h] = tb[h] + tau[h],  e[wait h] >= te[h] +
    work[wait h],  Z >= te[h]
    """
    assert v.step_time is not None
    for h in v.alone:
        present = v.joins[h, h]
        v.model.add(v.transfer_begin[h] >= v.units[StepKind.START, h].end).only_enforce_if(present)
        v.model.add(v.transfer_end[h] == v.transfer_begin[h] + v.transfer_ticks[h]).only_enforce_if(
            present
        )
        v.model.add(v.step_time >= v.transfer_end[h]).only_enforce_if(present)
        _, work = _steps_and_work(v, StepKind.WAIT, h)
        v.model.add(v.units[StepKind.WAIT, h].end >= v.transfer_end[h] + work).only_enforce_if(
            present
        )


def stream_order(v: Variables) -> None:
    """(12) Streams: transfers of one stream follow each other in order of launch.

    for all h, g of one stream with x[h,h], x[g,g]:
        b[start h, start g]:  tb[g] >= te[h];   otherwise:  tb[h] >= te[g]
    """
    for h, g in combinations(v.alone, 2):
        if v.arrays.stream[h] != v.arrays.stream[g]:
            continue
        first = _order(v, (StepKind.START, h), (StepKind.START, g))
        both: Literals = [v.joins[h, h], v.joins[g, g]]
        v.model.add(v.transfer_begin[g] >= v.transfer_end[h]).only_enforce_if(*both, first)
        v.model.add(v.transfer_begin[h] >= v.transfer_end[g]).only_enforce_if(
            *both, first.negated()
        )


def positions(v: Variables) -> None:
    """(14) Positions of attached nodes: a node stands where the step of its unit stands; a member's
    start at its copy-in.

    y[c]:  p[start] = v[start c],  p[prologue j] = u[start c] + j,  p[wait] = u[wait c],  p[epilogue
    j] = u[wait c] + 1 + j j[c,h]:  the same in start h and wait h, prologues and epilogues of
    members one after the other x[c,h], z[h]:  p[start] = p[cast] = v[prepare h];  p[prologue j] =
    u[prepare h] + (prologues of members before c, casts left out) + j copied out:  p[wait] =
    u[copy-out c], p[epilogue j] = u[copy-out c] + 1 + j;  other members:  in wait h, one after the
    other
    """
    k = v.arrays
    for c in v.alone:
        prologue = k.prologue_of(c)
        epilogue = k.epilogue_of(c)
        start, wait = (
            v.attached_position[int(k.attached_of_start[c])],
            v.attached_position[int(k.attached_of_wait[c])],
        )
        for h in v.heads(c):
            several: Literals = [v.joins[c, h], v.several[h]]
            if (StepKind.COPY_IN, h) in v.units:
                unit = v.units[StepKind.COPY_IN, h]
                v.model.add(start == unit.last).only_enforce_if(*several)
                before = sum(
                    v.joins[d, h] * _prologue(v, d, several=True)[0] for d in v.members(h) if d < c
                )
                for j, f in enumerate(prologue):
                    position = (
                        unit.last if f == k.cast_attached[c] else unit.first + before + j
                    )  # the cast is the last of them
                    v.model.add(v.attached_position[int(f)] == position).only_enforce_if(*several)
            if not v.gathers(c):
                unit = v.units[StepKind.WAIT, h]
                v.model.add(wait == unit.first).only_enforce_if(v.joins[c, h])
                before = sum(v.joins[d, h] * _epilogue(v, d)[0] for d in v.members(h) if d < c)
                for j, f in enumerate(epilogue):
                    v.model.add(
                        v.attached_position[int(f)] == unit.first + 1 + before + j
                    ).only_enforce_if(v.joins[c, h])
            if (c, h) in v.carried:
                _stand_together(v, c, h)
        alone = v.alone[c]
        v.model.add(start == v.units[StepKind.START, c].last).only_enforce_if(alone)
        for j, f in enumerate(prologue):
            v.model.add(
                v.attached_position[int(f)] == v.units[StepKind.START, c].first + j
            ).only_enforce_if(alone)
        if v.gathers(c):
            _stand_in(v, wait, epilogue.tolist(), (StepKind.WAIT, c), alone)
            if (StepKind.COPY_OUT, c) in v.units:
                _stand_in(v, wait, epilogue.tolist(), (StepKind.COPY_OUT, c), v.loose[c].negated())


def _stand_together(v: Variables, c: int, h: int) -> None:
    """Prologue, start, wait and epilogue of ``c`` in the coalesced bucket of ``h``; waits of
    reductions are placed anyway.
    """
    k, in_bucket = v.arrays, v.carried[c, h]
    sooner = [d for d in v.members(h) if d < c]
    unit, waited = v.units[StepKind.START, h], v.units[StepKind.WAIT, h]
    v.model.add(v.attached_position[int(k.attached_of_start[c])] == unit.last).only_enforce_if(
        in_bucket
    )
    before = sum(v.joins[d, h] * _prologue(v, d)[0] for d in sooner)
    for i, f in enumerate(k.prologue_of(c)):
        v.model.add(v.attached_position[int(f)] == unit.first + before + i).only_enforce_if(
            in_bucket
        )
    if v.gathers(c):
        v.model.add(
            v.attached_position[int(k.attached_of_wait[c])] == waited.first
        ).only_enforce_if(in_bucket)
        before = sum(v.joins[d, h] * _epilogue(v, d)[0] for d in sooner)
        for i, f in enumerate(k.epilogue_of(c)):
            v.model.add(
                v.attached_position[int(f)] == waited.first + 1 + before + i
            ).only_enforce_if(in_bucket)


def _stand_in(
    v: Variables,
    wait: cp_model.IntVar,
    epilogue: list[int],
    unit: Unit,
    if_present: cp_model.BoolVarT,
) -> None:
    first = v.units[unit].first
    v.model.add(wait == first).only_enforce_if(if_present)
    for j, f in enumerate(epilogue):
        v.model.add(v.attached_position[f] == first + 1 + j).only_enforce_if(if_present)


def prefetch(v: Variables) -> None:
    """(17) Prefetch: at most so many compute nodes stand between a start and the first need of its
    members.

    for all h:  a[start h, min_{c in h} need[c] - max prefetch - 1]
    (where that is a compute node)
    """
    most = v.caps.max_prefetch
    if most is None:
        return
    if v.compute_order.free is not None:
        prefetch_in_any_order(v, most)
        return
    num_compute = len(v.arrays.compute_ticks)
    for h in v.alone:
        members = v.members(h)
        by_need = sorted(members, key=lambda c: int(v.arrays.need_slot[c]))
        for i, c in enumerate(by_need):
            need_slot = int(v.arrays.need_slot[c])
            earliest = need_slot - most - 1
            if need_slot >= num_compute or earliest < 0:
                continue
            sooner: Literals = [
                v.joins[d, h].negated()
                for d in by_need[:i]
                if int(v.arrays.need_slot[d]) < need_slot
            ]
            v.model.add(v.after_compute[(StepKind.START, h), earliest] == 1).only_enforce_if(
                v.joins[c, h], *sooner
            )


ALL = (
    membership,
    heads,
    bucket_caps,
    unit_sizes,
    compute_in_order,
    unit_against_compute,
    unit_against_unit,
    bucket_sequence,
    readiness,
    need,
    transfers,
    stream_order,
    prices,
    positions,
    memory,
    in_flight,
    prefetch,
    plan,
    forms,
    order_of_the_compute,
)
"""Every constraint of the formulation, in order."""
