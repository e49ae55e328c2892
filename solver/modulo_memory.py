"""Constraints (M14) and (M15): bytes alive, and bytes in flight, at every place of the body (see ``apsched.solver.modulo_constraints``)."""

from ortools.sat.python import cp_model

from apsched.solver.loop_body import REDUCTION
from apsched.solver.modulo_variables import ModuloVariables
from apsched.solver.variables import Linear
from apsched.units import ALLOCATION_BYTES

Terms = list[Linear]


def memory_of_layers(v: ModuloVariables) -> None:
    """(M14) Memory: the blocks of all layers that are alive at a place, where the base leaves least room, are within the peak.

        for all places:  base + sum_{q there} out[s] L[s,q] + sum_{q there} held[r] (1 - V[r,q]) + buffers of buckets <= M

    A gather counts ahead of its need, later it is in the base. At a copy-in a bucket of reductions is there beside what it copies; at a
    copy-out a bucket of gathers is there beside its copies: all of them, or, where each is copied at its own need, those so far.
    """
    for place, site in enumerate(v.body.sites):
        held = _held(v, place)
        before, after = _prefetched(v, place, -1), _prefetched(v, place, 0)
        gap, compute = _buffers(v, place)
        for s in v.body.of_role(REDUCTION):
            if v.body.slots[s].launch_site % v.body.num_sites == place:
                copied_in = [v.body.columns[b].in_blocks * v.chosen[b] for b in v.columns_of(s)]
                v.alive_blocks.append(sum([site.gap_blocks, *before, *held, *gap, *copied_in]))
        for copied in [[], *_copied(v, place)]:
            v.alive_blocks.append(sum([site.gap_blocks, *after, *held, *gap, *copied]))
        if not site.early:
            v.alive_blocks.append(sum([site.spine_blocks, *after, *held, *compute]))
    for alive in v.alive_blocks:
        v.model.add(alive <= v.peak_blocks)


def in_flight_of_layers(v: ModuloVariables) -> None:
    """(M15) In flight: at every place, the output bytes of what all layers have started and not waited for are within their cap.

    for all places:  sum_{q there} out[s] L[s,q] + sum_{q there} out[r] (1 - V[r,q]) <= in-flight cap

    A member of a bucket counts until its own need, though it is waited for with its anchor.
    """
    cap = v.body.caps.in_flight_cap_bytes
    if cap is None:
        return
    for place in range(v.body.num_sites):
        flying: Terms = []
        for s, since in v.launched.items():
            flying += [v.body.slots[s].out_blocks * since.at(q) for q in v.instances(place, range(since.first, since.past + 1))]
        for s, since in v.waited.items():
            instances = v.instances(place, range(v.body.slots[s].launch_site, since.past))
            flying += [v.body.slots[s].out_blocks * (1 - since.at(q)) for q in instances]
        v.model.add(sum(flying) <= cap // ALLOCATION_BYTES)


def _prefetched(v: ModuloVariables, place: int, offset: int) -> Terms:
    """Return the blocks of gathers that have been launched by ``offset`` sites after ``place`` and are not needed yet."""
    found: Terms = []
    for s, since in v.launched.items():
        slot = v.body.slots[s]
        for q in v.instances(place, since):
            launched = since.at(q + offset)
            found.append(slot.out_blocks * launched)
            if slot.held_blocks and not isinstance(launched, bool):
                found.append(slot.held_blocks * _alone_and(v, s, launched))
    return found


def _alone_and(v: ModuloVariables, s: int, launched: cp_model.IntVar) -> cp_model.IntVar:
    """Return a literal that is true where ``s`` is alone and has been ``launched``: only then its input is held."""
    alone = next(v.chosen[b] for b in v.columns_of(s) if not v.body.columns[b].several)
    both = v.model.new_bool_var(f"held[{s}]")
    v.model.add_bool_or([alone.negated(), launched.negated(), both])
    return both


def _held(v: ModuloVariables, place: int) -> Terms:
    """Return the blocks of what reductions read, launched and not waited for."""
    return [
        v.body.slots[s].held_blocks * (1 - since.at(q))
        for s, since in v.waited.items()
        for q in v.instances(place, range(v.body.slots[s].launch_site, since.past))
    ]


def _buffers(v: ModuloVariables, place: int) -> tuple[Terms, Terms]:
    """Return the blocks, in the gap and in compute, of buffers whose first members are copied out while others wait for their need."""
    slots, size = v.body.slots, v.body.num_sites
    gap: Terms = []
    compute: Terms = []
    for b, column in enumerate(v.body.columns):
        if column.copies_early or not column.several:
            continue
        needs = {slots[s].wait_site + shift * size: 0 for s, shift in column.members}
        for s, shift in column.members:
            needs[slots[s].wait_site + shift * size] += slots[s].out_blocks
        for q in range(min(needs), max(needs) + 1):
            if q % size == place:
                gap.append(sum(blocks for need, blocks in needs.items() if need < q) * v.chosen[b])
                if q < max(needs):
                    compute.append(sum(blocks for need, blocks in needs.items() if need <= q) * v.chosen[b])
    return gap, compute


def _copied(v: ModuloVariables, place: int) -> list[Terms]:
    """Return for each turn at ``place`` the blocks that a copy-out adds: copies beside the buffer that they come from."""
    slots = v.body.slots
    turns: dict[int, Terms] = {}
    for b, column in enumerate(v.body.columns):
        if not any(column.copy_ticks) and not column.several:
            continue
        for s, shift in column.members:
            if s not in v.launched or slots[s].wait_site != place:
                continue
            if column.copies_early:
                copied = [m for m, _ in column.members] if s == column.anchor and shift == 0 else []
            else:
                copied = [m for m, other in column.members if other == shift and slots[m].wait_site == place]
            if copied:
                turns.setdefault(s, []).append(sum(slots[m].out_blocks for m in copied) * v.chosen[b])
    return list(turns.values())
