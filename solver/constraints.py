"""Constraints of the CP-SAT model, numbered as in ``docs/formulation.md``: one function, one formula.

Symbols: x[c,h] joins, y[c] alone, z[h] several, u/v first and last position, s/e begin and end in ticks of a unit, b[i,j] before,
a[i,k] after spine node k, tb/te begin and end of a transfer, T transfer ticks, p[f] position of a float.
"""

from itertools import combinations

from ortools.sat.python import cp_model

from apsched.price_curve import PriceCurve
from apsched.solver.constraints_memory import in_flight, memory
from apsched.solver.variables import COPY, PREPARE, START, WAIT_UNIT, Linear, Unit, Variables

Literals = list[cp_model.BoolVarT]


def membership(v: Variables) -> None:
    """(1) Membership: every collective is in one bucket. For all c: sum_h x[c,h] = 1."""
    for c in v.alone:
        v.model.add_exactly_one(v.joins[c, h] for h in v.heads(c)).with_name(f"membership[{c}]")


def heads(v: Variables) -> None:
    """(2) Heads: a bucket is alone or has several. For all h: x[h,h] = y[h] + z[h]; x[c,h] <= z[h]; z[h] <= sum_{c>h} x[c,h]."""
    for h in v.alone:
        others = [v.joins[c, h] for c in v.members(h) if c != h]
        v.model.add(v.joins[h, h] == v.alone[h] + v.several[h]).with_name(f"head[{h}]")
        for literal in others:
            v.model.add_implication(literal, v.several[h])
        v.model.add_bool_or([*others, v.several[h].negated()])


def bucket_caps(v: Variables) -> None:
    """(3) Bucket caps: for all h with several: sum_c size[c] x[c,h] <= bucket cap.

    Topo-span: x[c,h] = x[c',h] = 1 only if |rank[c] - rank[c']| <= max span.
    """
    compact, caps = v.compact, v.caps
    for h in v.alone:
        members = v.members(h)
        if caps.bucket_cap_bytes is not None:
            total = sum(int(compact.size_bytes[c]) * v.joins[c, h] for c in members)
            v.model.add(total <= caps.bucket_cap_bytes).only_enforce_if(v.several[h]).with_name(f"bucket_cap[{h}]")
        if caps.max_topo_span is not None:
            for c, d in combinations(members, 2):
                if abs(int(compact.start_rank[c] - compact.start_rank[d])) > caps.max_topo_span:
                    v.model.add_bool_or([v.joins[c, h].negated(), v.joins[d, h].negated()])


def unit_sizes(v: Variables) -> None:
    """(4) Size of a unit: v = u + (number of its steps) - 1, and e >= s + (its work).

    prepare: prologues of all members, copy-in; start: (alone: prologue,) launch; wait: epilogues of members that are not copied out;
    copy-out: the copy, the epilogue.
    """
    for (what, c), unit in v.units.items():
        steps, work = _steps_and_work(v, what, c)
        v.model.add(unit.last == unit.first + steps - 1).only_enforce_if(unit.present)
        v.model.add(unit.end >= unit.begin + work).only_enforce_if(unit.present)


def _steps_and_work(v: Variables, what: str, c: int) -> tuple[Linear, Linear]:
    k = v.compact
    if what == PREPARE:
        members = v.members(c)
        steps = 1 + sum(v.joins[d, c] * _prologue(v, d)[0] for d in members)
        return steps, v.copy_in_ticks[c] + sum(v.joins[d, c] * _prologue(v, d)[1] for d in members)
    if what == START:
        steps = 1 + v.alone[c] * _prologue(v, c)[0]
        alone = int(k.launch_ticks[c]) + _prologue(v, c)[1]
        return steps, v.alone[c] * alone + v.several[c] * int(k.bucket_launch_ticks[c])
    if what == COPY:
        return 1 + _epilogue(v, c)[0], int(k.copy_out_ticks[c]) + _epilogue(v, c)[1]
    if v.gathers(c):
        return 1 + v.alone[c] * _epilogue(v, c)[0], v.alone[c] * _epilogue(v, c)[1]
    return (
        1 + sum(v.joins[d, c] * _epilogue(v, d)[0] for d in v.members(c)),
        sum(v.joins[d, c] * _epilogue(v, d)[1] for d in v.members(c)),
    )


def _prologue(v: Variables, c: int) -> tuple[int, int]:
    k = v.compact
    floats = k.prologue_list[k.prologue_begin[c] : k.prologue_begin[c + 1]]
    return len(floats), int(k.float_ticks[floats].sum())


def _epilogue(v: Variables, c: int) -> tuple[int, int]:
    k = v.compact
    floats = k.epilogue_list[k.epilogue_begin[c] : k.epilogue_begin[c + 1]]
    return len(floats), int(k.float_ticks[floats].sum())


def spine_order(v: Variables) -> None:
    """(5) Spine: s[k+1] >= s[k] + d[k]; step time >= s[m] (the end of the spine and of everything after it)."""
    for k, ticks in enumerate(v.compact.spine_ticks):
        v.model.add(v.spine_begin[k + 1] >= v.spine_begin[k] + int(ticks)).with_name(f"spine[{k}]")
    assert v.step_time is not None
    v.model.add(v.step_time >= v.spine_begin[-1])
    for unit in v.units.values():
        v.model.add(v.step_time >= unit.end).only_enforce_if(unit.present)


def unit_against_spine(v: Variables) -> None:
    """(6) A unit is before or after a spine node, in position and in time.

    a[i,k]: u_i > pos(k), s_i >= s[k] + d[k];  not a[i,k]: v_i < pos(k), e_i <= s[k];  a[i,k+1] implies a[i,k].
    """
    for (unit, k), after in v.after_spine.items():
        i = v.units[unit]
        position, ticks = v.spine_position(k), int(v.compact.spine_ticks[k])
        v.model.add(i.first > position).only_enforce_if(i.present, after)
        v.model.add(i.begin >= v.spine_begin[k] + ticks).only_enforce_if(i.present, after)
        v.model.add(i.last < position).only_enforce_if(i.present, after.negated())
        v.model.add(i.end <= v.spine_begin[k]).only_enforce_if(i.present, after.negated())
        if k:
            v.model.add_implication(after, v.after_spine[unit, k - 1])


def unit_against_unit(v: Variables) -> None:
    """(7) One compute stream, one order: b[i,j]: v_i < u_j and e_i <= s_j; otherwise v_j < u_i and e_j <= s_i."""
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
    """(8) Within a bucket: prepare before start before wait before every copy-out of a member."""
    for h in v.alone:
        if (PREPARE, h) in v.units:
            v.model.add_implication(v.several[h], _order(v, (PREPARE, h), (START, h)))
        v.model.add(_order(v, (START, h), (WAIT_UNIT, h)) == 1)
        for c in v.members(h):
            if (COPY, c) in v.units:
                v.model.add_implication(v.joins[c, h], _order(v, (WAIT_UNIT, h), (COPY, c)))


def readiness(v: Variables) -> None:
    """(9) Readiness: x[c,h] implies that h's units stand after spine node ready[c]-1 and after the waits that c depends on."""
    k = v.compact
    for (c, h), joins in v.joins.items():
        last_producer = int(k.ready_gap[c]) - 1
        awaited = [int(d) for d in k.after_list[k.after_begin[c] : k.after_begin[c + 1]]]
        for unit in (PREPARE, h), (START, h):
            if unit not in v.units or (unit[0] == PREPARE and c == h and len(v.members(h)) == 1):
                continue
            if last_producer >= 0:
                v.model.add_implication(joins, v.after_spine[unit, last_producer])
            for d in awaited:
                for head in v.heads(d):
                    if head == h:
                        v.model.add_bool_or([joins.negated(), v.joins[d, head].negated()])  # no bucket with an ancestor
                    else:
                        v.model.add_implication(joins, _order(v, (WAIT_UNIT, head), unit)).only_enforce_if(v.joins[d, head])
                if (COPY, d) in v.units:
                    v.model.add_implication(joins, _order(v, (COPY, d), unit))


def need(v: Variables) -> None:
    """(10) Need: c's result exists before spine node need[c]: its wait (x[c,h]) and its copy-out stand before it."""
    num_spine = len(v.compact.spine_ticks)
    for (c, h), joins in v.joins.items():
        k = int(v.compact.need_gap[c])
        if k < num_spine:
            v.model.add_implication(joins, v.after_spine[(WAIT_UNIT, h), k].negated())
            if (COPY, c) in v.units:
                v.model.add(v.after_spine[(COPY, c), k] == 0)


def transfers(v: Variables) -> None:
    """(11) A transfer begins after its launch and lasts T: tb >= e(start), te = tb + T; its wait: e(wait) >= te + (its work)."""
    assert v.step_time is not None
    for h in v.alone:
        present = v.joins[h, h]
        v.model.add(v.transfer_begin[h] >= v.units[START, h].end).only_enforce_if(present)
        v.model.add(v.transfer_end[h] == v.transfer_begin[h] + v.transfer_ticks[h]).only_enforce_if(present)
        v.model.add(v.step_time >= v.transfer_end[h]).only_enforce_if(present)
        if h not in v.boundary.pinned:  # the wait of a pinned one stands behind the window
            _, work = _steps_and_work(v, WAIT_UNIT, h)
            v.model.add(v.units[WAIT_UNIT, h].end >= v.transfer_end[h] + work).only_enforce_if(present)


def stream_order(v: Variables) -> None:
    """(12) A stream runs in order of launch: b[start h, start h'] implies tb[h'] >= te[h]."""
    for h, g in combinations(v.alone, 2):
        if v.compact.stream[h] != v.compact.stream[g]:
            continue
        first = _order(v, (START, h), (START, g))
        both: Literals = [v.joins[h, h], v.joins[g, g]]
        v.model.add(v.transfer_begin[g] >= v.transfer_end[h]).only_enforce_if(*both, first)
        v.model.add(v.transfer_begin[h] >= v.transfer_end[g]).only_enforce_if(*both, first.negated())


def prices(v: Variables) -> None:
    """(13) Prices: T[h] >= price(sum_c size[c] x[c,h]) and copy-in >= copy price(sum_c input[c] x[c,h]), piece by piece of the curve."""
    k = v.compact
    for h in v.alone:
        key = v.problem.keys[int(k.key[h])]
        members = v.members(h)
        v.model.add(v.transfer_ticks[h] == int(k.transfer_ticks[h])).only_enforce_if(v.alone[h])
        if len(members) > 1:
            sizes = {c: int(k.size_bytes[c]) for c in members}
            inputs = {c: int(k.input_bytes[c]) for c in members}
            _at_least_price(v, h, key.price, sizes, v.transfer_ticks[h])
            _at_least_price(v, h, v.problem.copy_price, inputs, v.copy_in_ticks[h])


_EXACT_PRODUCT = 2**53
"""Beyond it the slope of a piece is rounded down to a fraction that CP-SAT's 64-bit sums can hold."""


def _at_least_price(v: Variables, h: int, curve: PriceCurve, bytes_of: dict[int, int], price: cp_model.IntVar) -> None:
    total = sum(size * v.joins[c, h] for c, size in bytes_of.items())
    largest = sum(bytes_of.values())
    pieces = []
    last = len(curve.size_bytes) - 2
    for k, (low, high) in enumerate(zip(curve.size_bytes, curve.size_bytes[1:], strict=False)):
        if low > largest:
            break
        here = v.model.new_bool_var(f"piece[{h},{k}]")
        pieces.append(here)
        v.model.add(total >= low).only_enforce_if(here)
        if k < last:
            v.model.add(total <= high).only_enforce_if(here)
        rise, run = curve.price_ticks[k + 1] - curve.price_ticks[k], high - low
        while run * max(v.horizon_ticks, 1) > _EXACT_PRODUCT or rise * max(largest, 1) > _EXACT_PRODUCT:
            rise, run = rise // 2, -(-run // 2)
        v.model.add(price * run >= curve.price_ticks[k] * run + (total - low) * rise).only_enforce_if(here, v.several[h])
    v.model.add_exactly_one(pieces)


def positions(v: Variables) -> None:
    """(14) Positions of floats: a start stands at the end of its start unit, a member's at its copy-in; a wait at its wait or copy-out."""
    k = v.compact
    for c in v.alone:
        prologue = k.prologue_list[k.prologue_begin[c] : k.prologue_begin[c + 1]]
        epilogue = k.epilogue_list[k.epilogue_begin[c] : k.epilogue_begin[c + 1]]
        start, wait = v.float_position[int(k.float_of_start[c])], v.float_position[int(k.float_of_wait[c])]
        for h in v.heads(c):
            several: Literals = [v.joins[c, h], v.several[h]]
            if (PREPARE, h) in v.units:
                unit = v.units[PREPARE, h]
                v.model.add(start == unit.last).only_enforce_if(*several)
                before = sum(v.joins[d, h] * _prologue(v, d)[0] for d in v.members(h) if d < c)
                for j, f in enumerate(prologue):
                    v.model.add(v.float_position[int(f)] == unit.first + before + j).only_enforce_if(*several)
            if not v.gathers(c):
                unit = v.units[WAIT_UNIT, h]
                v.model.add(wait == unit.first).only_enforce_if(v.joins[c, h])
                before = sum(v.joins[d, h] * _epilogue(v, d)[0] for d in v.members(h) if d < c)
                for j, f in enumerate(epilogue):
                    v.model.add(v.float_position[int(f)] == unit.first + 1 + before + j).only_enforce_if(v.joins[c, h])
        alone = v.alone[c]
        v.model.add(start == v.units[START, c].last).only_enforce_if(alone)
        for j, f in enumerate(prologue):
            v.model.add(v.float_position[int(f)] == v.units[START, c].first + j).only_enforce_if(alone)
        if v.gathers(c):
            _stand_in(v, wait, epilogue.tolist(), (WAIT_UNIT, c), alone)
            if (COPY, c) in v.units:
                _stand_in(v, wait, epilogue.tolist(), (COPY, c), alone.negated())


def _stand_in(v: Variables, wait: cp_model.IntVar, epilogue: list[int], unit: Unit, if_present: cp_model.BoolVarT) -> None:
    first = v.units[unit].first
    v.model.add(wait == first).only_enforce_if(if_present)
    for j, f in enumerate(epilogue):
        v.model.add(v.float_position[f] == first + 1 + j).only_enforce_if(if_present)


def prefetch(v: Variables) -> None:
    """(17) Prefetch: the start of h stands after spine node min_{c in h} need[c] - max prefetch - 1."""
    most = v.caps.max_prefetch
    if most is None:
        return
    num_spine = len(v.compact.spine_ticks)
    for h in v.alone:
        members = v.members(h)
        by_need = sorted(members, key=lambda c: int(v.compact.need_gap[c]))
        for i, c in enumerate(by_need):
            need_gap = int(v.compact.need_gap[c])
            earliest = need_gap - most - 1
            if need_gap >= num_spine or earliest < 0:
                continue
            sooner: Literals = [v.joins[d, h].negated() for d in by_need[:i] if int(v.compact.need_gap[d]) < need_gap]
            v.model.add(v.after_spine[(START, h), earliest] == 1).only_enforce_if(v.joins[c, h], *sooner)


def boundary(v: Variables) -> None:
    """(18) Boundary of a window: tb[h] >= what the stream still carries; s[k] >= the end of an earlier transfer that k waits for;
    step time >= end of spine, of each stream and of each pinned transfer + what follows each; a pinned launch keeps its gap.
    """
    edge = v.boundary
    assert v.step_time is not None
    for h in v.alone:
        stream = int(v.compact.stream[h])
        v.model.add(v.transfer_begin[h] >= edge.stream_free_ticks.get(stream, 0))
        later = max(edge.after_stream_ticks.get(stream, 0), edge.after_transfer_ticks.get(h, 0))
        if later:
            v.model.add(v.step_time >= v.transfer_end[h] + later).only_enforce_if(v.joins[h, h])
    for k, ticks in edge.release_ticks.items():
        v.model.add(v.spine_begin[k] >= ticks)
    for c, k in edge.awaited.items():
        v.model.add(v.spine_begin[k] >= v.transfer_end[c])
    if edge.after_spine_ticks:
        v.model.add(v.step_time >= v.spine_begin[-1] + edge.after_spine_ticks)
        for unit in v.units.values():
            v.model.add(v.step_time >= unit.end + edge.after_spine_ticks).only_enforce_if(unit.present)
    num_spine = len(v.compact.spine_ticks)
    for c, gap in edge.pinned.items():
        if gap > 0:
            v.model.add(v.after_spine[(START, c), gap - 1] == 1)
        if gap < num_spine:
            v.model.add(v.after_spine[(START, c), gap] == 0)
        if num_spine:
            v.model.add(v.after_spine[(WAIT_UNIT, c), num_spine - 1] == 1)
    for (c, first), (d, second) in combinations(edge.pinned.items(), 2):
        if first == second:  # as they stand in the program, which numbered them in that order
            v.model.add(_order(v, (START, c), (START, d)) == 1)


ALL = (
    membership, heads, bucket_caps, unit_sizes, spine_order, unit_against_spine, unit_against_unit, bucket_sequence, readiness,
    need, transfers, stream_order, prices, positions, memory, in_flight, prefetch, boundary,
)  # fmt: skip
"""Every constraint of the formulation, in order."""
