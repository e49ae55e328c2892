"""Constraints (15) and (16): bytes alive, and bytes in flight, at every position of the order (see
``apsched.solver.cpsat.constraints``).
"""

from ortools.sat.python import cp_model

from apsched.kinds import CollectiveKind
from apsched.schedule.schedule import StepKind
from apsched.solver.cpsat.variables import Linear, Variables
from apsched.units import ALLOCATION_BYTES


def memory(v: Variables) -> None:
    """(15) Memory: the blocks of 512 bytes alive at every position are within the peak, and the
    peak within the memory cap.

        for all positions p:  sum_{lives j: first[j] <= p <= last[j]} blocks[j] <= M
        512 M + kept bytes <= memory cap

    A storage lives from its birth to the last position that touches it; the buffers of flat buckets
    live as in ``apsched.schedule.memory``. The output of a cast lives only where the collective is
    in no flat bucket.
    """
    lives = [
        *(_fixed_lives(v) if v.compute_order.free is None else _lives_in_any_order(v)),
        *_storage_lives(v),
        *_buffer_lives(v),
    ]
    cap = v.caps.memory_cap_bytes
    most = sum(-(-int(b) // ALLOCATION_BYTES) for b in v.arrays.storage_bytes) * 3
    if v.compute_order.free is None:
        most += int(v.arrays.base_compute_bytes.max()) + int(v.arrays.base_slot_bytes.max())
    else:
        most += sum(life.size_bytes for life in v.compute_order.free.lives)
    limit = most if cap is None else min(most, (cap - v.arrays.kept_bytes) // ALLOCATION_BYTES)
    v.peak_blocks = v.model.new_int_var(0, max(limit, 0), "peak")
    if limit < 0:
        v.model.add_bool_or([])
    v.model.add_cumulative([i for i, _ in lives], [d for _, d in lives], v.peak_blocks).with_name(
        "memory"
    )


Life = tuple[cp_model.IntervalVar, Linear]


def _fixed_lives(v: Variables) -> list[Life]:
    k = v.arrays
    lives: list[Life] = []
    for g in range(len(k.base_slot_bytes)):
        begin, at = g * v.position_step + 1 if g else 0, (g + 1) * v.position_step
        for first, past, live in (
            (begin, at, k.base_slot_bytes[g]),
            (at, at + 1, k.base_compute_bytes[g]),
        ):
            if live and past > first:
                lives.append(
                    (
                        v.model.new_fixed_size_interval_var(first, past - first, f"base[{g}]"),
                        int(live) // ALLOCATION_BYTES,
                    )
                )
    return lives


def _lives_in_any_order(v: Variables) -> list[Life]:
    assert v.compute_order.free is not None
    lives: list[Life] = []
    for i, life in enumerate(v.compute_order.free.lives):
        first = v.model.new_int_var(
            0, 0 if life.from_beginning else v.last_position, f"fixed_first[{i}]"
        )
        last = v.model.new_int_var(0, v.last_position, f"fixed_last[{i}]")
        for k in life.users:
            v.model.add(first <= v.compute_position(k))
        for k in life.nodes:
            v.model.add(last >= v.compute_position(k))
        lives.append(
            _life(
                v,
                first,
                last,
                v.model.new_constant(1),
                life.size_bytes // ALLOCATION_BYTES,
                f"fixed[{i}]",
            )
        )
    return lives


def _storage_lives(v: Variables) -> list[Life]:
    k = v.arrays
    lives: list[Life] = []
    output_of = {int(s): c for c, s in enumerate(k.output_storage) if s >= 0}
    cast_for = {int(k.input_storage[c]): c for c in range(len(k.kind)) if k.cast_attached[c] >= 0}
    for s, size in enumerate(k.storage_bytes):
        owner = output_of.get(s)
        inside_bucket = owner is not None and not v.gathers(owner)
        present = v.loose[owner] if owner is not None and inside_bucket else v.model.new_constant(1)
        if s in cast_for:
            present = v.loose[cast_for[s]]
        first = v.model.new_int_var(0, v.last_position, f"first[{s}]")
        last = v.model.new_int_var(0, v.last_position, f"last[{s}]")
        _born(v, s, owner, first, last)
        for node in v.compute_order.touching[s]:
            v.model.add(last >= v.compute_position(node))
        for f in k.touches_of(s):
            c = int(k.collective_of_wait[f])
            touch = v.model.add(last >= v.attached_position[int(f)])
            if c >= 0 and k.input_storage[c] == s:
                touch.only_enforce_if(v.loose[c])  # a flat bucket holds no input beyond its copy-in
        lives.append(_life(v, first, last, present, int(size) // ALLOCATION_BYTES, f"storage[{s}]"))
    return lives


def _born(
    v: Variables, s: int, owner: int | None, first: cp_model.IntVar, last: cp_model.IntVar
) -> None:
    k = v.arrays
    f, compute_order = int(k.storage_birth_attached[s]), int(k.storage_birth_compute[s])
    if f < 0:
        birth: Linear = v.compute_position(compute_order) if compute_order >= 0 else 0
        v.model.add(first <= birth)
        v.model.add(last >= birth)
    elif owner is not None and v.gathers(owner) and (StepKind.COPY_OUT, owner) in v.units:
        v.model.add(first <= v.attached_position[int(k.attached_of_start[owner])]).only_enforce_if(
            v.loose[owner]
        )
        v.model.add(first <= v.attached_position[int(k.attached_of_wait[owner])]).only_enforce_if(
            v.loose[owner].negated()
        )
    else:
        v.model.add(first <= v.attached_position[f])


def _buffer_lives(v: Variables) -> list[Life]:
    k = v.arrays
    lives: list[Life] = []
    for h in v.alone:
        members = v.members(h)
        if len(members) < 2:
            continue
        kind = v.problem.keys[int(k.key[h])].kind
        copied_in, started, waited = (
            v.units[StepKind.COPY_IN, h].last,
            v.units[StepKind.START, h].last,
            v.units[StepKind.WAIT, h].first,
        )
        outputs = _blocks(v, h, {c: int(k.output_bytes[c]) for c in members})
        first = v.model.new_int_var(0, v.last_position, f"buffer_first[{h}]")
        last = v.model.new_int_var(0, v.last_position, f"buffer_last[{h}]")
        several = v.several[h]
        for c in members:
            touches = (
                [v.units[StepKind.COPY_OUT, c].first] if v.gathers(c) else _touches_of_output(v, c)
            )
            for position in touches:
                v.model.add(last >= position).only_enforce_if(v.joins[c, h], several)
        v.model.add(last >= waited).only_enforce_if(several)
        v.model.add(
            first <= (started if kind == CollectiveKind.REDUCE_SCATTER else copied_in)
        ).only_enforce_if(several)
        lives.append(_life(v, first, last, several, outputs, f"buffer[{h}]"))
        if kind == CollectiveKind.REDUCE_SCATTER:
            inputs = _blocks(v, h, {c: int(k.input_bytes[c]) for c in members})
            lives.append(_life(v, copied_in, waited, several, inputs, f"concatenated[{h}]"))
    return lives


def _touches_of_output(v: Variables, c: int) -> list[Linear]:
    k = v.arrays
    s = int(k.output_storage[c])
    touches: list[Linear] = [v.attached_position[int(f)] for f in k.touches_of(s)]
    touches += [v.compute_position(node) for node in v.compute_order.touching[s]]
    return touches


def _blocks(v: Variables, h: int, bytes_of: dict[int, int]) -> cp_model.IntVar:
    """Return the blocks that the allocator takes for the sum of the members' bytes."""
    blocks = v.model.new_int_var(0, -(-sum(bytes_of.values()) // ALLOCATION_BYTES), f"blocks[{h}]")
    total = sum(size * v.joins[c, h] for c, size in bytes_of.items())
    v.model.add(ALLOCATION_BYTES * blocks >= total).only_enforce_if(v.several[h])
    return blocks


def _life(
    v: Variables, first: Linear, last: Linear, present: cp_model.BoolVarT, blocks: Linear, name: str
) -> Life:
    length = v.model.new_int_var(1, v.last_position + 1, f"length[{name}]")
    return v.model.new_optional_interval_var(first, length, last + 1, present, name), blocks


def in_flight(v: Variables) -> None:
    """(16) In flight: the output bytes of collectives started and not yet waited for are
    within their cap.

    for all positions p:  sum_{h: v[start h] <= p < u[wait h]} sum_c out[c] x[c,h] <= in-flight cap
    """
    cap = v.caps.in_flight_cap_bytes
    if cap is None:
        return
    k, lives = v.arrays, []
    for h in v.alone:
        first, wait = v.units[StepKind.START, h].last, v.units[StepKind.WAIT, h].first
        length = v.model.new_int_var(1, v.last_position, f"flight[{h}]")
        interval = v.model.new_optional_interval_var(
            first, length, wait, v.joins[h, h], f"flight[{h}]"
        )
        carried = v.model.new_int_var(
            0, sum(int(k.output_bytes[c]) for c in v.members(h)), f"carried[{h}]"
        )
        v.model.add(carried == sum(int(k.output_bytes[c]) * v.joins[c, h] for c in v.members(h)))
        lives.append((interval, carried))
    v.model.add_cumulative([i for i, _ in lives], [d for _, d in lives], cap).with_name("in_flight")
