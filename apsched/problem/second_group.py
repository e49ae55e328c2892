"""Gathers on a second process group with the same process ranks, so that they need not queue behind
reductions.

FSDP gathers of a group that also carries something else move to a group of their own, hence to a
stream of their own. Both groups lie on the same links: in time they share bandwidth
(:mod:`apsched.problem.contention`), so that nothing is won but the order. A group is made by
:func:`apsched.writeback.second_groups.running_second_groups`; until then it goes by a name
that says which it doubles.
"""

from dataclasses import replace

from apsched.kinds import CollectiveKind
from apsched.names import is_second, second_name
from apsched.problem.contention import Contention
from apsched.problem.problem import Collective, Key, Problem


def second_groups(problem: Problem) -> tuple[str, ...]:
    """Return the second groups of ``problem``, in the order of its streams."""
    return tuple(group for group in problem.streams if is_second(group))


def with_second_groups(problem: Problem) -> Problem | None:
    """Return ``problem`` with FSDP gathers on groups of their own; ``None`` where none has to queue
    behind anything else.
    """
    gathers = {problem.keys[c.key].group for c in problem.collectives if _moves(problem, c)}
    others = {problem.keys[c.key].group for c in problem.collectives if not _moves(problem, c)}
    doubled = [
        group for group in problem.streams if group in gathers & others and not is_second(group)
    ]
    if not doubled:
        return None
    streams = (*problem.streams, *map(second_name, doubled))
    keys = list(problem.keys)
    key_of: dict[int, int] = {}
    for c in problem.collectives:
        if c.key not in key_of and _moves(problem, c) and problem.keys[c.key].group in doubled:
            key_of[c.key] = len(keys)
            keys.append(_second(problem.keys[c.key], streams))
    collectives = tuple(
        replace(c, key=key_of[c.key]) if c.key in key_of and _moves(problem, c) else c
        for c in problem.collectives
    )
    return replace(
        problem,
        keys=tuple(keys),
        collectives=collectives,
        streams=streams,
        contention=_sharing(problem.contention, doubled),
    )


def _moves(problem: Problem, c: Collective) -> bool:
    return problem.keys[c.key].kind == CollectiveKind.ALL_GATHER and not c.on_path


def _second(key: Key, streams: tuple[str, ...]) -> Key:
    group = second_name(key.group)
    return replace(key, group=group, stream=streams.index(group))


def _sharing(contention: Contention | None, doubled: list[str]) -> Contention:
    """Return ``contention`` with each second group on the links of the one that it doubles, on a
    link of both where that has none.
    """
    old = contention or Contention()
    links, links_of = list(old.links), dict(old.links_of_group)
    for group in doubled:
        if not links_of.get(group):
            links_of[group] = (len(links),)
            links.append(f"links of group {group}")
        links_of[second_name(group)] = links_of[group]
    return replace(old, links=tuple(links), links_of_group=tuple(links_of.items()))
