"""Lower bounds on step time under contention; proofs in ``docs/formulation.md``.

Contention makes nothing faster, so every bound without it holds. It adds these, with A the least
time in which anything is transferred, f the factor by which compute is slower then, and L, W, E, d
as in ``apsched.solver.bounds.step_time``:

    (C1)  a link carries the bytes of all its streams as a stream carries its transfers: (B1) to
          (B7) and (R1) to (R4) hold with the streams of a link taken as one and prices without
          latency
    (C2)  step time >= sum_i d_i + W(all collectives) + (1 - 1/f) A
    (C3)  step time >= (E_k + tail_j) / f + sum_{k <= i < j} d_i + (1 - 1/f) A  for k < j,
          tail_j = L(reductions of a stream that are ready at slot j or behind it)
    (C4)  step time >= L(all of a stream or link, without latency) + (1 - 1/g) (sum_i d_i + W(all
          collectives)), g the factor by which transfers are slower while compute runs
"""

from dataclasses import replace

import numpy as np

from apsched.costs.price_curve import PriceCurve
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.contention import ContentionArrays
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.bounds.linear_program import lp_bound
from apsched.solver.bounds.step_time import (
    TimeBound,
    earliest,
    least_work,
    step_time_bound,
    transfer_bound,
    work_bound,
)
from apsched.solver.bounds.tighten import tighten

_TAILS = 64
"""Tails of at most this many sizes are tried of each stream."""


def shared_bound(instance: Instance, *, in_order: bool) -> TimeBound:
    """Return the best of the bounds that contention adds; not ``in_order``: those for any order of
    the compute.
    """
    instance = without_copies(instance)
    if in_order:
        instance = tighten(instance)
    arrays, contention = instance.arrays, instance.problem.contention
    shares = arrays.shares
    assert shares is not None
    everything = np.arange(len(arrays.kind))
    work = int(arrays.compute_ticks.sum()) + work_bound(instance, least_work(instance), everything)
    found = [TimeBound(ticks=0, source=BoundSource.CONTENTION)]
    busy = max(
        (transfer_bound(instance, collectives) for collectives in _of_each_stream(arrays)),
        default=0,
    )
    for link, name in enumerate(contention.links if contention else ()):
        users = _users(shares, link)
        if len(set(arrays.stream[everything[np.isin(arrays.stream, users)]].tolist())) < 2:
            continue
        as_one = _as_one_stream(instance, users)
        load = transfer_bound(as_one, everything[as_one.arrays.stream == 0])
        busy = max(busy, load)
        bounds = [TimeBound(ticks=load, source="")]
        if in_order:
            bounds += [step_time_bound(as_one), lp_bound(as_one)]
        found.append(TimeBound(ticks=max(bound.ticks for bound in bounds), source=f"link {name}"))
    if shares.full_move > shares.slow_move:
        found += [
            _beside_work(instance, shares, users, work) for users in _used_alike(arrays, shares)
        ]
    if shares.full_speed > shares.slow_speed and len(everything):
        found.append(_all_work(shares, work, busy))
        if in_order:
            found.append(_between(instance, shares, busy))
    return max(found, key=lambda bound: bound.ticks)


def _of_each_stream(arrays: ProblemArrays) -> list[Ints]:
    return [
        collectives
        for stream in range(arrays.num_streams)
        if len(collectives := np.nonzero(arrays.stream == stream)[0])
    ]


def _users(shares: ContentionArrays, link: int) -> list[int]:
    return [
        s
        for s in range(len(shares.link_begin) - 1)
        if link in shares.link_list[shares.link_begin[s] : shares.link_begin[s + 1]]
    ]


def _as_one_stream(instance: Instance, users: list[int]) -> Instance:
    """Return the problem in which the streams ``users`` are one, the first, and its transfers have
    no latency: (C1).
    """
    problem, arrays = instance.problem, instance.arrays
    others = [stream for stream in range(arrays.num_streams) if stream not in users]
    number = np.array(
        [
            0 if stream in users else 1 + others.index(stream)
            for stream in range(arrays.num_streams)
        ],
        dtype=np.int64,
    )
    latency = np.array(
        [k.price(0) if k.stream in users else 0 for k in problem.keys], dtype=np.int64
    )
    keys = tuple(
        replace(
            k,
            stream=int(number[k.stream]),
            price=_without_latency(k.price) if k.stream in users else k.price,
        )
        for k in problem.keys
    )
    merged = replace(
        arrays,
        stream=number[arrays.stream],
        transfer_ticks=arrays.transfer_ticks - latency[arrays.key],
        num_streams=1 + len(others),
    )
    streams = ("of the link", *(problem.streams[stream] for stream in others))
    return replace(instance, problem=replace(problem, keys=keys, streams=streams), arrays=merged)


def _without_latency(price: PriceCurve) -> PriceCurve:
    return PriceCurve(
        size_bytes=price.size_bytes,
        price_ticks=tuple(p - price.price_ticks[0] for p in price.price_ticks),
    )


def _all_work(shares: ContentionArrays, work: int, busy: int) -> TimeBound:
    """Return the least time of all ``work`` of the compute stream if something is transferred for
    ``busy`` ticks: (C2).
    """
    slow = (shares.full_speed - shares.slow_speed) * busy // shares.full_speed
    return TimeBound(ticks=work + slow, source=BoundSource.SLOWER_COMPUTE)


def _used_alike(arrays: ProblemArrays, shares: ContentionArrays) -> list[list[int]]:
    """Return each stream that has transfers alone, and the streams of each link."""
    used = set(arrays.stream.tolist())
    links = (_users(shares, link) for link in range(shares.num_links))
    return [[stream] for stream in sorted(used)] + [
        users for users in links if len(used.intersection(users)) > 1
    ]


def _beside_work(
    instance: Instance,
    shares: ContentionArrays,
    users: list[int],
    work: int,
) -> TimeBound:
    """Return the least time of the bytes of the streams ``users``, which are one or share a link,
    if ``work`` slows them: (C4).
    """
    as_one = _as_one_stream(instance, users)
    load = transfer_bound(as_one, np.nonzero(as_one.arrays.stream == 0)[0])
    slow = (shares.full_move - shares.slow_move) * work // shares.full_move
    return TimeBound(ticks=load + slow, source=BoundSource.SLOWER_TRANSFERS)


def _between(instance: Instance, shares: ContentionArrays, busy: int) -> TimeBound:
    """Return the best over heads and tails: (C3)."""
    full, slow, num_compute = (
        shares.full_speed,
        shares.slow_speed,
        len(instance.arrays.compute_ticks),
    )
    begin, _ = earliest(instance)
    done = instance.arrays.time_before
    heads = np.maximum.accumulate(begin * slow - done * full)  # [k]: the best head at k or before
    best = 0
    for j, tail in _tails(instance, num_compute):
        if j > 0:
            best = max(
                best, int(heads[j - 1]) + tail * slow + int(done[j]) * full + (full - slow) * busy
            )
    return TimeBound(ticks=best // full, source=BoundSource.SLOWER_COMPUTE)


def _tails(instance: Instance, num_compute: int) -> list[tuple[int, int]]:
    """Return (j, least time to transfer reductions of one stream that are ready at slot j or
    behind).
    """
    arrays = instance.arrays
    found = [(num_compute, 0)]
    moving = np.nonzero(arrays.reductions)[0]
    for stream in range(arrays.num_streams):
        on_stream = moving[arrays.stream[moving] == stream]
        on_stream = on_stream[np.argsort(-arrays.ready_slot[on_stream], kind="stable")]
        for i in range(min(len(on_stream), _TAILS)):
            found.append(
                (
                    int(arrays.ready_slot[on_stream[i]]),
                    transfer_bound(instance, on_stream[: i + 1]),
                )
            )
    return found
