"""A lower bound on the time of a whole step, over every choice for each parameter: kept from
forward to backward, resharded in its node, or gathered again.

    f      forward;  its schedules are those of any choice, with less memory held and less work
    f'     forward with every parameter resharded that can be
    g      backward with every parameter kept: the work that every choice has; a node has its lowest
           price among the choices that were solved, and the bound assumes that of the others
    i      a parameter that backward gathers again by the collectives C_i, unless it is kept, which
           takes m_i bytes, or resharded, which takes n_i bytes: then by the collectives N_i in its
           node, and forward copies a part of it, in k_i
    y_i    1 where parameter i is kept, z_i 1 where it is resharded; here y_i, z_i >= 0 and
           y_i + z_i <= 1;  x_i = 1 - y_i - z_i
    M      bytes that are left for kept parameters between forward and backward, and at the compute
           nodes at which all that may be kept are alive if they are kept
    B(.)   the bound on one graph (:mod:`apsched.solver.bounds.best`)
    w_c    bytes of collective c, times the least price of a byte on its stream
    o_c    least work of collective c on the compute stream, alone or in a bucket

    (S1)  sum_i (m_i y_i + n_i z_i) <= M
    (S2)  step >= F + B(g),  F = B(f)  or  F = B(f') - sum_i (1 - z_i) k_i
    (S3)  step >= F + L_s(g) + sum_i (x_i sum_{c in C_i on s} w_c + z_i sum_{c in N_i on s} w_c)
          for each stream s
    (S4)  step >= F + compute(g) + sum_{c in g} o_c + sum_i (x_i sum_{c in C_i} o_c
          + z_i sum_{c in N_i} o_c)
    (S5)  step >= F + l_0 compute(g) + sum_{c in g} e_c + sum_i (x_i sum_{c in C_i} e_c
          + z_i sum_{c in N_i} e_c),  e_c = min(sum_r l_r alone_rc, sum_r l_r shared_rc)
    (S6)  step >= F + V(g) + sum_{i in I} u (x_i sum_{c in C_i} o_c + z_i sum_{c in N_i} o_c)

The second F holds without a memory cap, since a schedule of any forward becomes one of f' with the
copies that it lacks, which delay it by no more than their own time. L_s(g) is the least time that
the collectives of g keep stream s busy: buckets share no fixed cost that is counted here, since w_c
is linear in bytes, at the least rate of a bucket of everything that any choice gathers. (S5) weighs
the compute stream (r = 0) and each stream against each other with weights l that sum to 1, as (R1)
and (R2) of :mod:`apsched.solver.bounds.linear_program`: alone_rc and shared_rc are the costs of c
there if it is launched alone or in a bucket. It holds for any weights; the used weights are duals
of the LP for the y and z that the previous weights give. V(g) is the bound (V8) about the reduction
that ends last (:mod:`apsched.solver.bounds.any_order.last_reduction`), I the parameters that
compute before that reduction uses: their launches and copies come before it, too, of which the
share u cannot be beside a stall. Each row is least over y and z under (S1) where the most time per
byte is saved first, along the lower convex hull of the three choices of each parameter, the last
one in part.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import certainly_alive
from apsched.solver.bounds.best import best_bound
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.bounds.whole_step_rows import Backward, KeptItem, Row, Sizes, rows_of
from apsched.units import ALLOCATION_BYTES


def seam_bytes(forward: Problem, backward: Problem) -> tuple[int, int]:
    """Return the bytes that forward leaves and those that backward is given, under any schedules,
    where nothing is kept.
    """
    last = forward.num_nodes - 1
    left = sum(s.size_bytes for s in forward.storages if s.kept or s.uses[-1:] == (last,))
    given = sum(s.size_bytes for s in backward.storages if s.kept or s.birth < 0)
    return left, given


def bytes_beside(problem: Problem, caps: Caps, kept: Collection[int]) -> int:
    """Return the most bytes, without those of the storages ``kept``, that are alive at one compute
    node in every schedule of ``problem``, of the nodes at which all of ``kept`` are alive in every
    schedule, too; 0 where there is none.
    """
    alive = certainly_alive(Orders(Instance.of(problem, caps)), caps.max_compute_move, kept)
    return int(alive.live_bytes[alive.all_apart].max(initial=0))


def least_prices(
    problems: Iterable[Problem], chains: Mapping[str, Sequence[str]] | None = None
) -> dict[str, int]:
    """Return the ticks of each node, by name: the least that one of ``problems`` has, since a
    choice in between may fuse it as either.

    ``chains`` has the nodes before each node that some problems lack, which may be one kernel with
    it. Where both are, the ticks of the node contain those of its chain; the chain has ticks of its
    own from the problems without that node, at most as many.
    """
    chains = chains or {}
    least: dict[str, int] = {}
    for problem in problems:
        ticks = dict(zip(problem.node_names, problem.duration_ticks, strict=True))
        for name in chains.keys() & ticks.keys():
            ticks[name] += sum(ticks.pop(one) for one in chains[name])
        for name, own in ticks.items():
            least[name] = min(own, least.get(name, own))
    for name in chains.keys() & least.keys():
        if least[name] < sum(least[one] for one in chains[name]):
            least |= dict.fromkeys(chains[name], 0)
    return least


def with_prices(problem: Problem, prices: Mapping[str, int]) -> Problem:
    """Return ``problem`` with the ``prices`` of its nodes, in ticks."""
    return replace(problem, duration_ticks=tuple(prices[name] for name in problem.node_names))


def graph_bound(problem: Problem, caps: Caps) -> int:
    """Return B(problem) in ticks, for every order of the compute that ``caps`` allow."""
    instance = Instance.of(problem, caps)
    orders = None if caps.max_compute_move == 0 else Orders(instance)
    return best_bound(instance, orders).ticks


def with_more_moves(caps: Caps, count: int) -> Caps:
    """Return ``caps`` of a graph which those of a graph with up to ``count`` more compute nodes
    imply: without these, another node may be ``count`` places farther from its own.
    """
    if not caps.max_compute_move:
        return caps
    return replace(caps, max_compute_move=caps.max_compute_move + max(count, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Facts about a step for bounds; made by :meth:`of`."""

    rows: tuple[Row, ...]
    """(S2) to (S6)."""
    sizes: Sizes
    """The least bytes that keeping or resharding a parameter adds."""
    free_bytes: int | None
    """M; ``None`` without a memory cap."""

    @classmethod
    def of(
        cls,
        *,
        forward_ticks: int,
        again: Problem,
        kept: Problem,
        items: Sequence[KeptItem],
        caps: Caps,
        free_bytes: int | None,
        in_node: Problem | None = None,
        forward_in_node_ticks: int = 0,
    ) -> "StepBound":
        """Return the bound of a step whose backward is ``again``, ``kept`` with all ``items`` kept,
        or ``in_node`` with all resharded that can be; ``free_bytes`` is M.

        ``forward_ticks`` is B(f), ``forward_in_node_ticks`` B(f') without a memory cap. Without
        ``in_node`` resharding counts as free.
        """
        more = len(again.compute_order) - len(kept.compute_order)
        caps_of_kept = with_more_moves(replace(caps, memory_cap_bytes=None), more)
        backward = Backward(
            again=without_copies(Instance.of(again, caps)),
            kept=without_copies(Instance.of(kept, caps_of_kept)),
            in_node=None if in_node is None else without_copies(Instance.of(in_node, caps_of_kept)),
            items=tuple(items),
        )
        sizes = _sizes(items)
        nothing = (0.0,) * len(items)
        fixed = graph_bound(kept, caps_of_kept)
        rows = (
            Row(source=BoundSource.PATHS, ticks=fixed, again=nothing, in_node=nothing),
            *rows_of(backward, sizes, free_bytes),
        )
        forwards = [Row(source="", ticks=forward_ticks, again=nothing, in_node=nothing)]
        if in_node is not None:
            parts = tuple(float(item.part_ticks) for item in items)
            ticks = forward_in_node_ticks - sum(parts)
            forwards.append(Row(source="", ticks=ticks, again=nothing, in_node=parts))
        return cls(
            rows=tuple(row + forward for forward, row in product(forwards, rows)),
            sizes=sizes,
            free_bytes=free_bytes,
        )

    @property
    def saved_ticks(self) -> tuple[float, ...]:
        """The time that keeping each parameter saves in that of (S3) to (S6) which is the bound
        over all choices.
        """
        rows = [row for row in self.rows if any(row.again)] or self.rows
        return max(rows, key=lambda row: row.least(self.sizes, self.free_bytes)).again

    def over_choices(self) -> TimeBound:
        """Return the bound over all choices: (S2) to (S6) under (S1)."""
        return _best((row, row.least(self.sizes, self.free_bytes)) for row in self.rows)

    def of_choice(self, kept: Iterable[int], in_node: Iterable[int] = ()) -> TimeBound:
        """Return the bound for one choice: the items ``kept`` and those resharded ``in_node``, by
        index.
        """
        whole, parts = frozenset(kept), frozenset(in_node)
        return _best((row, row.of_choice(whole, parts)) for row in self.rows)

    def may_fit(self, kept: Iterable[int], in_node: Iterable[int] = ()) -> bool:
        """Return whether (S1) allows the items ``kept`` and those resharded ``in_node``."""
        total = sum(self.sizes.kept[i] for i in kept) + sum(self.sizes.in_node[i] for i in in_node)
        return self.free_bytes is None or total <= self.free_bytes


def _sizes(items: Sequence[KeptItem]) -> Sizes:
    """Return m and n, inside a bucket's buffer, which is rounded up once."""
    kept, in_node = (
        tuple(max(size - ALLOCATION_BYTES + 1, 0) for size in sizes)
        for sizes in (
            [item.kept_bytes for item in items],
            [item.node_bytes or item.kept_bytes for item in items],
        )
    )
    return Sizes(kept=kept, in_node=in_node)


def _best(found: Iterable[tuple[Row, float]]) -> TimeBound:
    row, ticks = max(found, key=lambda one: one[1])
    return TimeBound(ticks=int(ticks), source=row.source)
