"""A real problem with its modules merged: one collective for all of a module and key, one compute
node for all between two of them.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from apsched.kinds import NodeKind
from apsched.problem.problem import Collective, Problem, Storage, check_problem


def coarse(problem: Problem, module_of: Callable[[str], str]) -> Problem:
    """Return ``problem`` with the collectives of each key merged whose modules have one
    ``module_of``.

    Compute between two places where a merged collective is first needed or ready is one node; views
    go. All of what merged collectives read, and of what they write, is one storage.
    """
    return _Merge(problem, module_of).problem()


class _Merge:
    def __init__(self, problem: Problem, module_of: Callable[[str], str]) -> None:
        self.old = problem
        self.groups: dict[tuple[str, int], list[Collective]] = defaultdict(list)
        for c in problem.collectives:
            assert not c.on_path
            self.groups[module_of(c.module), c.key].append(c)
        self.hosts: list[frozenset[str]] = self._hosts()

    def _hosts(self) -> list[frozenset[str]]:
        """Return for each old node the new nodes that it is part of or follows at once."""
        old, name = self.old, {}
        for group in self.groups.values():
            label = old.node_names[group[0].start]
            for c in group:
                name |= dict.fromkeys(c.prologue, f"{label}/prologue") | dict.fromkeys(
                    c.epilogue, f"{label}/epilogue"
                )
                name |= {c.start: f"{label}/start", c.wait: f"{label}/wait"}
        hosts: list[frozenset[str]] = []
        run, runs = 0, self._runs()
        for node, kind in enumerate(old.kinds):
            if node in runs:
                run = runs[node]
            if kind is NodeKind.VIEW:
                hosts.append(frozenset().union(*(hosts[p] for p in old.predecessors[node])))
            elif node in name:
                hosts.append(frozenset((name[node],)))
            else:
                hosts.append(
                    frozenset(
                        (f"compute{run}" if kind is NodeKind.COMPUTE else old.node_names[node],)
                    )
                )
        return hosts

    def _runs(self) -> dict[int, int]:
        """Return for each compute node the number of its run."""
        old = self.old
        place = {node: k for k, node in enumerate(old.compute_order)}
        last: list[int] = []  # for each node the last compute node that it depends on
        for node, before in enumerate(old.predecessors):
            last.append(place.get(node, max((last[p] for p in before), default=-1)))
        cuts = set()
        for group in self.groups.values():
            needs = [
                place[old.needs[old.collectives.index(c)][0]]
                for c in group
                if old.needs[old.collectives.index(c)]
            ]
            cuts |= {min(needs)} if needs else set()
            cuts.add(max(last[p] for c in group for p in old.predecessors[c.start]) + 1)
        return {node: sum(cut <= k for cut in cuts) for node, k in place.items()}

    def problem(self) -> Problem:
        old = self.old
        first: dict[str, int] = {}
        members: dict[str, list[int]] = defaultdict(list)
        for node, kind in enumerate(old.kinds):
            if kind is not NodeKind.VIEW:
                (host,) = self.hosts[node]
                members[host].append(node)
                first.setdefault(host, node)
        before = {
            host: {h for n in nodes for p in old.predecessors[n] for h in self.hosts[p]} - {host}
            for host, nodes in members.items()
        }
        order = _topological(before, first)
        rank = {host: i for i, host in enumerate(order)}
        storages, storage_at = self._storages(rank)
        collectives = [self._collective(group, rank, storage_at) for group in self.groups.values()]
        starts = {
            host: old.duration_ticks[nodes[0]]
            for host, nodes in members.items()
            if host.endswith("/start")
        }
        result = replace(
            old,
            node_names=tuple(order),
            kinds=tuple(old.kinds[first[host]] for host in order),
            duration_ticks=tuple(
                starts.get(host, sum(old.duration_ticks[n] for n in members[host]))
                for host in order
            ),
            predecessors=tuple(tuple(sorted(rank[h] for h in before[host])) for host in order),
            modules=tuple(old.modules[first[host]] for host in order),
            storages=tuple(storages),
            collectives=tuple(sorted(collectives, key=lambda c: c.start)),
            kernels=(),
            cuts=(),
        )
        check_problem(result)
        return result

    def _storages(self, rank: dict[str, int]) -> tuple[list[Storage], dict[int, int]]:
        """Return the new storages, and for each old one that a collective touches its new one."""
        old = self.old
        together: dict[int, int] = {}  # old storage -> the first of those that it is merged with
        for group in self.groups.values():
            for name in ("input_storage", "output_storage"):
                together |= {getattr(c, name): getattr(group[0], name) for c in group}
        merged: dict[int, list[int]] = defaultdict(list)
        for s in range(len(old.storages)):
            merged[together.get(s, s)].append(s)
        storages, at = [], {}
        for several in merged.values():
            uses = {
                rank[host] for s in several for u in old.storages[s].uses for host in self.hosts[u]
            }
            births = {
                rank[host]
                for s in several
                if old.storages[s].birth >= 0
                for host in self.hosts[old.storages[s].birth]
            }
            assert len(births) <= 1
            at |= dict.fromkeys(several, len(storages))
            storages.append(
                Storage(
                    size_bytes=sum(old.storages[s].size_bytes for s in several),
                    birth=min(births, default=-1),
                    kept=all(old.storages[s].kept for s in several),
                    uses=tuple(sorted(uses)),
                )
            )
        return storages, at

    def _collective(
        self, group: list[Collective], rank: dict[str, int], storage_at: dict[int, int]
    ) -> Collective:
        label = self.old.node_names[group[0].start]
        travels = {
            part: (rank[f"{label}/{part}"],) if any(getattr(c, part) for c in group) else ()
            for part in ("prologue", "epilogue")
        }
        casts = all(c.cast for c in group)
        return replace(
            group[0],
            start=rank[f"{label}/start"],
            wait=rank[f"{label}/wait"],
            size_bytes=sum(c.size_bytes for c in group),
            input_bytes=sum(c.input_bytes for c in group),
            output_bytes=sum(c.output_bytes for c in group),
            input_storage=storage_at[group[0].input_storage],
            output_storage=storage_at[group[0].output_storage],
            bucketable=all(c.bucketable for c in group),
            cast=travels["prologue"] if casts else (),
            cast_bytes=sum(c.cast_bytes for c in group) if casts else 0,
            **travels,
        )


def _topological(before: dict[str, set[str]], first: dict[str, int]) -> list[str]:
    """Return the new nodes in an order that the data allow, as captured where that leaves a choice;
    the output last.
    """
    missing = {host: len(earlier) for host, earlier in before.items()}
    after: dict[str, list[str]] = defaultdict(list)
    for host, earlier in before.items():
        for other in earlier:
            after[other].append(host)
    ready = [(first[host], host) for host, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, host = heapq.heappop(ready)
        order.append(host)
        for other in after[host]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (first[other], other))
    assert len(order) == len(before), "merged collectives wait for each other"
    return order
