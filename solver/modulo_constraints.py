"""Constraints of the modulo schedule, numbered as in ``docs/formulation.md``: one function, one formula.

Symbols. s, r: slots of the layer; a: anchor of a bucket; B: columns; q: sites through all layers, P of a layer, site q is at place
q mod P of layer q div P; i: layers on. x[B] chosen, z[a] anchor, j[s,a,i] joins; l/L[s,q] a gather is launched at q / by q; v/V[s,q] a
reduction is waited for at q / by q; w[s,q] work of a launch at q; e[s] end of a launch, t[s] end of a transfer; II the period, M the peak.
Of a place: R reached, A reductions waited for, F reductions launched, N gathers launched, C gathers copied out, D compute begins.
"""

from collections.abc import Iterator

from ortools.sat.python import cp_model

from apsched.solver.loop_body import GATHER, PINNED, REDUCTION
from apsched.solver.modulo_memory import in_flight_of_layers, memory_of_layers
from apsched.solver.modulo_variables import ModuloVariables, Since
from apsched.solver.variables import Linear

Literal = cp_model.IntVar | bool


def membership_of_slots(v: ModuloVariables) -> None:
    """(M1) Membership: every collective that moves is in one bucket; an anchor is one that has a bucket.

    for all s:  sum_{B with s} x[B] = 1;   z[a] = sum_{B of a} x[B];   x[B] implies j[s,a,i] for all members s, i of B
    """
    columns = v.body.columns
    for s in (*v.launched, *v.waited):
        v.model.add_exactly_one(v.chosen[b] for b, column in enumerate(columns) if s in {m for m, _ in column.members})
    for a, anchor in v.anchors.items():
        v.model.add(anchor == sum(v.chosen[b] for b in v.columns_of(a)))
    for b, column in enumerate(columns):
        for s, shift in column.members:
            v.model.add_implication(v.chosen[b], v.joins[s, column.anchor, shift])


def one_site(v: ModuloVariables) -> None:
    """(M2) One site: a gather is launched at one site, a reduction is waited for at one; for an anchor, within its reach.

    sum_q l[s,q] = 1,  L[s,q] = L[s,q-1] + l[s,q];   the same of v and V;   l[s,q] + z[s] <= 1,  v[s,q] + z[s] <= 1  beyond the reach of s
    """
    for at, since_of in ((v.launch_at, v.launched), (v.wait_at, v.waited)):
        for s, since in since_of.items():
            v.model.add_exactly_one(at[s, q] for q in range(since.first, since.past + 1))
            for q in range(since.first, since.past):
                v.model.add(since.at(q) == since.at(q - 1) + at[s, q])
            slot = v.body.slots[s]
            beyond = range(since.first, slot.launch_site) if s in v.launched else range(slot.wait_site + 1, since.past + 1)
            for q in beyond:
                _imply(v, [at[s, q], v.anchors[s]], False)


def together(v: ModuloVariables) -> None:
    """(M3) Together: the members of a bucket are launched, and waited for, with its anchor.

    j[s,a,i]:  L[s,q - iP] = L[a,q],  V[s,q - iP] = V[a,q]  for all q
    """
    size = v.body.num_sites
    for (s, a, shift), literal in v.joins.items():
        if s == a:
            continue
        since = v.launched if s in v.launched else v.waited
        one, other = since[s], since[a]
        for q in range(min(one.first + shift * size, other.first), max(one.past + shift * size, other.past)):
            _imply(v, [literal, one.at(q - shift * size)], other.at(q))
            _imply(v, [literal, other.at(q)], one.at(q - shift * size))


def launch_order(v: ModuloVariables) -> None:
    """(M4) Order of gathers: on one stream, buckets are launched in the order in which they are needed.

    z[a], z[b]:  L[b,q - iP] implies L[a,q]   where b of i layers on is the next b that is needed after a
    """
    size = v.body.num_sites
    for a, one in v.launched.items():
        for b, other in v.launched.items():
            if v.body.slots[a].stream != v.body.slots[b].stream:
                continue
            shift = 0 if (other.past, b) > (one.past, a) else 1
            for q in range(other.first + shift * size, one.past):
                _imply(v, [v.anchors[a], v.anchors[b], other.at(q - shift * size)], one.at(q))


def body_times(v: ModuloVariables) -> None:
    """(M5) Compute stream: pinned launches, waits of reductions, their launches, launches of gathers, copies, waits, compute.

    R[0] = 0,  A >= R + sum launch[pinned],  F = A + sum launch[reductions],  N = F + sum w,  C >= N + sum copy,  D >= C,
    R[q+1] = D[q] + d[q],  II = D[P-1] + d[P-1]
    """
    body, model = v.body, v.model
    model.add(v.times[0].reached == 0)
    for site, t in enumerate(v.times):
        pinned = sum(body.slots[s].launch_ticks for s in _launched_at(v, PINNED, site))
        finishing = sum(body.slots[s].epilogue_ticks * v.wait_at[s, q] for s, q in _places(v, v.waited, site))
        model.add(t.waited >= t.reached + pinned + finishing)
        model.add(t.prefetching == t.waited + sum(v.launch_ticks(s) for s in _launched_at(v, REDUCTION, site)))
        model.add(t.needing == t.prefetching + sum(v.launch_work[s, q] for s, q in _launches(v, site)))
        model.add(t.copied >= t.needing + sum(ticks * v.chosen[b] for _, b, ticks in _copies(v, site)))
        model.add(t.done >= t.copied + sum(body.slots[s].epilogue_ticks for s in _pinned_waits(v, site)))
        following = v.times[site + 1].reached if site + 1 < body.num_sites else v.period
        model.add(following == t.done + body.sites[site].ticks)


def launches_of_gathers(v: ModuloVariables) -> None:
    """(M6) Launches of gathers: at one place they follow each other in the order in which they are needed.

    l[s,q]:  w[s,q] >= launch[bucket of s];   l[s,q], z[s]:  e[s] >= F[q] + (q div P) II + sum w[r,p]
    with (r,p) at the place of q and not needed later
    """
    size = v.body.num_sites
    for site in range(size):
        before: list[cp_model.IntVar] = []
        for s, q in sorted(_launches(v, site), key=lambda sq: (v.body.slots[sq[0]].wait_site - sq[1], sq[0])):
            before.append(v.launch_work[s, q])
            v.model.add(v.launch_work[s, q] >= v.launch_ticks(s)).only_enforce_if(v.launch_at[s, q])
            end = v.times[site].prefetching + (q // size) * v.period + sum(before)
            v.model.add(v.launch_end[s] >= end).only_enforce_if(v.launch_at[s, q], v.anchors[s])


def launches_when_ready(v: ModuloVariables) -> None:
    """(M7) Launches of reductions and pinned collectives: when they are ready, one after the other.

    reductions: e[s] = A[q] + (q div P) II + sum_{r at that place, r <= s} launch[bucket of r];   pinned: e[s] = R[q] + (q div P) II + ...
    """
    size = v.body.num_sites
    for site, t in enumerate(v.times):
        for role, begin in ((REDUCTION, t.waited), (PINNED, t.reached)):
            work: list[Linear] = []
            for s in _launched_at(v, role, site):
                slot = v.body.slots[s]
                work.append(v.launch_ticks(s) if role == REDUCTION else slot.launch_ticks)
                v.model.add(v.launch_end[s] == begin + (slot.launch_site // size) * v.period + sum(work))


def streams_in_order(v: ModuloVariables) -> None:
    """(M8) Streams: transfers of gathers follow each other in order of need, those of all others in order of launch.

    t[s] >= e[s] + T[s],  t[s] >= t[the one before] + T[s];   t[first] + II >= t[last] + T[first]
    """
    for chain in _chains(v):
        for i, (s, layer) in enumerate(chain):
            length = _transfer(v, s)
            v.model.add(v.transfer_end[s] >= v.launch_end[s] + length)
            r, before = chain[i - 1]
            later = before - layer + (0 if i else 1)
            v.model.add(v.transfer_end[s] >= v.transfer_end[r] - later * v.period + length)


def streams_shared(v: ModuloVariables) -> None:
    """(M9) Streams shared by gathers and others: who is launched first is transferred first.

    z[a], z[s], L[a, q - 1] :  t[s] >= t[a] + T[s] - i II;   z[a], z[s], not L[a, q - 1]:  t[a] >= t[s] + T[a] + i II
    where s of i layers on is launched at site q
    """
    size = v.body.num_sites
    for a, since in v.launched.items():
        for s, slot in enumerate(v.body.slots):
            if slot.role == GATHER or slot.stream != v.body.slots[a].stream:
                continue
            always = [v.anchors[a], *([v.anchors[s]] if slot.role == REDUCTION else [])]
            first = -((slot.launch_site - since.first) // size)  # the first that is launched in the window, or the last before it
            last = -((slot.launch_site - since.past) // size)
            for shift in range(first - 1, last + 2):
                before = since.at(slot.launch_site + shift * size - 1)
                gather_first = v.transfer_end[s] + shift * v.period >= v.transfer_end[a] + _transfer(v, s)
                gather_last = v.transfer_end[a] >= v.transfer_end[s] + shift * v.period + _transfer(v, a)
                if before is not False:
                    v.model.add(gather_first).only_enforce_if(*always, *([] if before is True else [before]))
                if before is not True:
                    v.model.add(gather_last).only_enforce_if(*always, *([] if before is False else [before.negated()]))


def waits_of_gathers(v: ModuloVariables) -> None:
    """(M10) Needs: a bucket of gathers is waited for, and copied out, before the compute that needs it.

    z[a]:  C[q] >= t[a] + sum of the copies of a and of those that are needed there after a   with q the site where a is needed
    """
    for site, t in enumerate(v.times):
        copies = _copies(v, site)
        for a, since in v.launched.items():
            if since.past == site:
                work = sum(ticks * v.chosen[b] for s, b, ticks in copies if s >= a)
                v.model.add(t.copied >= v.transfer_end[a] + work).only_enforce_if(v.anchors[a])


def waits_of_reductions(v: ModuloVariables) -> None:
    """(M11) Waits of reductions: after the transfer; all epilogues of the place follow.

    v[s,q]:  A[q] + (q div P) II >= t[s] + sum_{(r,p) at the place of q} epilogue[r] v[r,p]
    """
    size = v.body.num_sites
    for site, t in enumerate(v.times):
        here = _places(v, v.waited, site)
        finishing = sum(v.body.slots[r].epilogue_ticks * v.wait_at[r, p] for r, p in here)
        for s, q in here:
            done = t.waited + (q // size) * v.period
            v.model.add(done >= v.transfer_end[s] + finishing).only_enforce_if(v.wait_at[s, q])


def waits_of_pinned(v: ModuloVariables) -> None:
    """(M12) Pinned collectives are waited for at their site; all epilogues of the place follow.

    D[q] + (q div P) II >= t[s] + sum epilogue[pinned at the place of q]
    """
    size = v.body.num_sites
    for site, t in enumerate(v.times):
        here = _pinned_waits(v, site)
        finishing = sum(v.body.slots[s].epilogue_ticks for s in here)
        for s in here:
            v.model.add(t.done + (v.body.slots[s].wait_site // size) * v.period >= v.transfer_end[s] + finishing)


def loads(v: ModuloVariables) -> None:
    """(M13) Loads (follows from the rest, and tightens the relaxation): no stream does more in a period than the period is long.

    II >= sum T of a stream;   II >= sum d + sum launch + sum copy + sum epilogue
    """
    body = v.body
    for stream in sorted({slot.stream for slot in body.slots}):
        v.model.add(v.period >= sum(_transfer(v, s) for s, slot in enumerate(body.slots) if slot.stream == stream))
    work: list[Linear] = [site.ticks for site in body.sites]
    work += [slot.epilogue_ticks + (slot.launch_ticks if slot.role == PINNED else 0) for slot in body.slots]
    work += [(column.launch_ticks + sum(column.copy_ticks)) * v.chosen[b] for b, column in enumerate(body.columns)]
    v.model.add(v.period >= sum(work))


def _imply(v: ModuloVariables, given: list[Literal], then: Literal) -> None:
    """Add: if all of ``given`` hold, ``then`` holds."""
    if then is True or any(literal is False for literal in given):
        return
    clause = [literal.negated() for literal in given if not isinstance(literal, bool)]
    v.model.add_bool_or([*clause, *([] if isinstance(then, bool) else [then])])


def _places(v: ModuloVariables, since_of: dict[int, Since], site: int) -> list[tuple[int, int]]:
    """Return the (slot, site) of all layers that lie at place ``site`` of the body."""
    size = v.body.num_sites
    return [(s, q) for s, since in since_of.items() for q in range(since.first, since.past + 1) if q % size == site]


def _launches(v: ModuloVariables, site: int) -> list[tuple[int, int]]:
    """Return the (gather, site) at place ``site`` of the body where a bucket with this anchor may be launched."""
    return [(s, q) for s, q in _places(v, v.launched, site) if (s, q) in v.launch_work]


def _launched_at(v: ModuloVariables, role: int, site: int) -> list[int]:
    """Return the slots of ``role`` that are launched at place ``site`` when they are ready."""
    return [s for s in v.body.of_role(role) if v.body.slots[s].launch_site % v.body.num_sites == site]


def _pinned_waits(v: ModuloVariables, site: int) -> list[int]:
    return [s for s in v.body.of_role(PINNED) if v.body.slots[s].wait_site % v.body.num_sites == site]


def _transfer(v: ModuloVariables, s: int) -> Linear:
    return v.body.slots[s].transfer_ticks if v.body.slots[s].role == PINNED else v.transfer_ticks(s)


def _copies(v: ModuloVariables, site: int) -> list[tuple[int, int, int]]:
    """Return (slot at whose turn, column, work) of each copy-out at place ``site``."""
    slots = v.body.slots
    found = []
    for b, column in enumerate(v.body.columns):
        for (s, _), ticks in zip(column.members, column.copy_ticks, strict=True):
            turn = column.anchor if column.copies_early else s
            if ticks and slots[turn].wait_site == site:
                found.append((turn, b, ticks))
    return found


def _chains(v: ModuloVariables) -> Iterator[list[tuple[int, int]]]:
    """Yield for each stream the slots whose transfers follow each other, each with the layer of the site that orders it."""
    slots, size = v.body.slots, v.body.num_sites
    for stream in sorted({slot.stream for slot in slots}):
        for gathers in (True, False):
            chain = []
            for s, slot in enumerate(slots):
                if slot.stream == stream and (slot.role == GATHER) == gathers:
                    layer, place = divmod(slot.wait_site if gathers else slot.launch_site, size)
                    chain.append((place, slot.role != PINNED, s, layer))
            yield [(s, layer) for _, _, s, layer in sorted(chain)]


ALL = (
    membership_of_slots, one_site, together, launch_order, body_times, launches_of_gathers, launches_when_ready, streams_in_order,
    streams_shared, waits_of_gathers, waits_of_reductions, waits_of_pinned, loads, memory_of_layers, in_flight_of_layers,
)  # fmt: skip
"""Every constraint of the modulo schedule, in order."""
