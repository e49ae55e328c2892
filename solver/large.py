"""Large problems: search under ever looser caps on prefetch and on memory, around other orders of
the compute where it may move; then the second and third objective within the slack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from apsched.config import Caps, SolveOptions
from apsched.schedule.result import Scored, SolvedBy, TradeOff
from apsched.schedule.schedule import Bucket
from apsched.solver.answer import Answer, Task, near_enough, slack_limit
from apsched.solver.arrays.instance import Instance
from apsched.solver.bounds.best import any_order_bound, search_bound
from apsched.solver.bounds.step_time import TimeBound, memory_bound
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.reorder.shorten_tail import with_shorter_tail
from apsched.solver.rungs import climb, is_tight, memory_rungs, prefetch_rungs
from apsched.solver.search.front import Found, Front
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search, kept_as_near

_ROUNDS_OF_ORDERS = 2
"""How often other orders of the compute are looked for, each time around the buckets found last."""
_WORTH_MOVING = 0.98
"""Share of the step time as captured up to which moving compute is all that is looked at."""
_SHARE_AS_CAPTURED = 4
"""Where compute may move, one in so many evaluations goes to buckets around it as captured."""
_SHARE_OF_THE_END = 4
"""One evaluation in so many goes to the buckets at the end, each time it changes."""
_EVALUATIONS_PER_WORK, _OF_A_COLLECTIVE = 300, 2
"""Evaluations of the search under one memory cap per unit of deterministic work in the budget: at
most, and for each collective.
"""
_FIRST_BUDGET, _NEXT_BUDGET = SolveOptions().budget, 4
"""A larger budget than the first, the default, begins with a search under that, and under each that
is so many times the one before.
"""
_MOST_LEFT = 0.001
"""Slack of which half ends the search. A larger one does not end it earlier: on its way the search
finds schedules with less memory.
"""
_NOTICEABLY_LESS = 0.98
"""Share of the peak as captured below which another order of the compute is taken for it."""
_TRIED_AGAIN = 3
"""Partitions that are laid out again under the next memory cap, the fastest first."""


def solve_large(task: Task, like: Scored | None = None) -> Answer:
    """Return the best schedule that the search finds; the buckets of ``like`` are tried, too."""
    at = task.fitting.instance
    search = climbed(task, like)
    cap = at.caps.memory_cap_bytes
    lower, fastest, time = None, None, search.fastest_ticks(cap)
    while time is not None and time != fastest:  # on its way to less memory it may become faster
        fastest, trade_offs = time, search.trade_offs(cap)
        lower = search.least_memory(fastest, slack_limit(fastest, task.options, task.made))
        time = search.fastest_ticks(cap)
    if lower is None or fastest is None:
        least = just_in_time(at)
        schedule = expand(at, least.program) if least is not None else None
        return Answer(schedule=schedule, bound=task.bound, solved_by=SolvedBy.JUST_IN_TIME)
    return Answer(
        schedule=expand(lower.instance, late_waits(lower.instance, lower.program())),
        bound=task.bound,
        solved_by=SolvedBy.SEARCH,
        fastest_ticks=fastest,
        trade_offs=trade_offs,
    )


def climbed(task: Task, like: Scored | None = None) -> "Climb":
    """Return the search after the last of its caps on prefetch and on memory; the buckets of
    ``like`` are tried, too. Where the memory bound shows that nothing fits, nothing is searched.
    """
    at, options = task.fitting, task.options
    bound = _bound_where_cut(task)
    at_least, left = bound, replace(options, time_slack=min(options.time_slack, _MOST_LEFT))
    may_fit = at.instance.has_room(memory_bound(at.instance.arrays))
    if at.mover is not None and may_fit and not at.instance.arrays.on_path.any():
        at_least = search_bound(at.instance)  # nothing to hide but the end: buckets first
    search = Climb(
        task=task,
        base=Search(
            instance=at.instance.without_memory_cap(),
            report=task.report,
            max_evaluations=0,
            floor_bytes=at.floor.peak_bytes,
            use=task.report.use,
        ),
        evaluations=0,
        enough_ticks=near_enough(bound, left),
        enough_as_captured_ticks=near_enough(at_least, left),
    )
    if at.nothing_fits:
        return search
    caps_below = memory_rungs(at.instance, at.floor.peak_bytes)
    cap = at.instance.caps.memory_cap_bytes
    every = memory_rungs(at.instance.without_memory_cap(), at.floor.peak_bytes)
    is_loose = cap is not None and caps_below == every
    tighter = prefetch_rungs(at.instance.caps.max_prefetch)
    climbs = (1 + len(tighter)) * (1 + len(caps_below) + is_loose)
    rounds = [max(1, int(b * _evaluations_per_work(at.instance))) for b in _rounds(options.budget)]
    task.report.use.planned = sum(rounds) * climbs
    for evaluations in rounds:
        if search.is_done(cap):
            break
        search.evaluations, search.at_an_end = evaluations, None
        below: Climb | None = None
        for max_prefetch in tighter:
            below = search.under_prefetch(max_prefetch, below)
            climb(caps_below, cap, below, is_loose=is_loose)
        if below is not None:
            search.take(below)
        if like is not None:
            search.try_buckets(like.schedule.buckets)
        climb(caps_below, cap, search, is_loose=is_loose)
    return search


def _rounds(budget: float) -> list[float]:
    """Return the budgets of the searches, one after the other, of which each knows the schedules of
    those before: so none is slower than that of a smaller budget of the sequence.
    """
    rounds, one = list[float](), _FIRST_BUDGET
    while 2 * one <= budget:
        rounds.append(one)
        one *= _NEXT_BUDGET
    return [*rounds, budget]


def _evaluations_per_work(instance: Instance) -> int:
    """Return the evaluations of a search per unit of the budget: few collectives have few moves."""
    return min(_EVALUATIONS_PER_WORK, _OF_A_COLLECTIVE * len(instance.arrays.kind))


def _bound_where_cut(task: Task) -> TimeBound:
    """Return the bound that the search stops near: that of the task, or with kernels cut that of
    schedules which cut them, too.
    """
    at = task.fitting
    if not task.is_cut or at.mover is None or at.instance.problem.contention is not None:
        return task.bound
    return any_order_bound(at.instance, at.mover.orders)


@dataclass(slots=True, kw_only=True)
class Climb:
    """The search of one problem under ever looser memory caps."""

    task: Task
    base: Search
    """Around the compute as captured, without a memory cap; nothing is searched in it."""
    evaluations: int
    """Evaluations of a search under one memory cap."""
    enough_ticks: int
    """Step time at which the search stops."""
    enough_as_captured_ticks: int
    """Step time at which a search for buckets around the compute as captured stops."""
    moved: Front = field(default_factory=Front)
    """Schedules found around other orders of the compute."""
    at_an_end: Found | None = None
    """The schedule from which the last search around a known order found no faster one."""

    def under_prefetch(self, max_prefetch: int, below: "Climb | None") -> "Climb":
        """Return this search under a tighter cap on prefetch, which begins with the schedules that
        ``below`` found.
        """
        instance = self.base.instance
        caps = replace(instance.caps, max_prefetch=max_prefetch)
        base = replace(self.base, instance=instance.within(caps), front=Front())
        tighter = replace(self, base=base, moved=Front(), at_an_end=None)
        if below is not None:
            tighter.take(below)
        return tighter

    def take(self, below: "Climb") -> None:
        """Take the schedules that a search under a tighter cap on prefetch found."""
        caps = below.base.instance.caps
        for mine, found in ((self.base.front, below.base.front), (self.moved, below.moved)):
            for one in found:
                instance = one.instance.within(self.base.instance.caps)
                mine.offer(instance, kept_as_near(one.candidate, caps))

    @property
    def mover(self) -> ComputeMover | None:
        return self.task.fitting.mover

    @property
    def on_path(self) -> bool:
        """Whether collectives on the path make it worthwhile to move compute everywhere."""
        return self.mover is not None and bool(self.base.instance.arrays.on_path.any())

    def fastest(self, cap_bytes: int | None) -> Found | None:
        """Return the fastest within the cap, of two as fast the one as captured."""
        found = (self.base.front.fastest(cap_bytes), self.moved.fastest(cap_bytes))
        return min(
            (f for f in found if f is not None),
            key=lambda f: f.candidate.figures.step_time_ticks,
            default=None,
        )

    def fastest_ticks(self, cap_bytes: int | None) -> int | None:
        """Return the step time of the fastest within the cap."""
        found = self.fastest(cap_bytes)
        return None if found is None else found.candidate.figures.step_time_ticks

    def smallest(self, limit_ticks: int) -> Found | None:
        """Return the schedule with the least peak within a step time; of two that differ by less
        than a share the one as captured, since moves that gain nothing are lost where costs are
        wrong.
        """
        captured = self.base.front.smallest(limit_ticks)
        moved = self.moved.smallest(limit_ticks)
        if captured is None or moved is None:
            return captured or moved
        least, other = (f.candidate.figures.peak_memory_bytes for f in (moved, captured))
        return moved if least < other * _NOTICEABLY_LESS else captured

    def trade_offs(self, cap_bytes: int | None) -> tuple[TradeOff, ...]:
        """Return the front of memory against step time within the cap."""
        both = Front()
        for found in (*self.base.front, *self.moved):
            if cap_bytes is None or found.candidate.figures.peak_memory_bytes <= cap_bytes:
                both.offer(found.instance, found.candidate)
        figures = [found.candidate.figures for found in both]
        return tuple(
            TradeOff(peak_memory_bytes=f.peak_memory_bytes, step_time_ticks=f.step_time_ticks)
            for f in figures
        )

    def is_done(self, cap_bytes: int | None) -> bool:
        """Whether a schedule that fits the cap is so near the bound that the search stops."""
        fastest = self.fastest_ticks(cap_bytes)
        return fastest is not None and fastest <= self.enough_ticks

    def has_buckets(self, cap_bytes: int | None) -> bool:
        """Whether no other buckets around the compute as captured can be noticeably faster."""
        captured = self.base.front.fastest(cap_bytes)
        enough = self.enough_as_captured_ticks
        return captured is not None and captured.candidate.figures.step_time_ticks <= enough

    def try_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Consider these buckets under the caps as stated."""
        self.base.within(self.task.fitting.instance.caps, self.evaluations).try_buckets(buckets)

    def under(self, cap_bytes: int | None) -> None:
        """Search under one memory cap."""
        caps = replace(self.base.instance.caps, memory_cap_bytes=cap_bytes)
        if self.has_buckets(cap_bytes):
            pass  # only the end of the step is left
        elif self.on_path:
            self._with_orders(caps)
        else:
            self._with_buckets(caps)
        if self.mover is not None:
            self._with_shorter_tail(self.mover, caps)

    def _with_buckets(self, caps: Caps, begun: Search | None = None) -> None:
        """Search from its own starts, then from known schedules, too: around the compute as
        captured, or where its memory is short, around an order with a lower peak, or around both.
        ``begun`` is a shorter search around the first of them.
        """
        for search in self._around_low_peaks(caps, begun):
            self._with_buckets_around(search)

    def _with_buckets_around(self, search: Search) -> None:
        known = self._known(search)
        enough = self.enough_as_captured_ticks
        search.portfolio()
        if search.best is None:
            return
        search.descend_from_many(enough)
        search.try_again(found.candidate for found in known)
        search.improve(enough)

    def _known(self, search: Search) -> list[Found]:
        """Return the fastest known schedules around the same order of the compute."""
        found = [found for found in search.front if found.instance.arrays is search.instance.arrays]
        return found[::-1][:_TRIED_AGAIN]

    def _around_low_peaks(self, caps: Caps, begun: Search | None) -> list[Search]:
        """Return the searches for buckets under a memory cap: with less than a layer of gathered
        weights above the floor as captured, both that order and the one with the lowest peak.
        """
        floor, at = self.task.fitting.floor, self.base.instance.within(caps)
        n = self.evaluations
        searches = [self._around_captured(caps, n) if begun is None else begun.again(n)]
        if self.mover is None or not floor.lowered:
            return searches
        if at.has_room(floor.as_captured_bytes) and is_tight(at, floor.as_captured_bytes):
            blocks = floor.lowered[-1].blocks
            search = self.base.within(caps, self.evaluations)
            around = search.around(self.mover.moved(blocks), self.evaluations)
            searches.append(replace(around, front=self.moved))
        return searches

    def _around_captured(self, caps: Caps, evaluations: int) -> Search:
        """Return a search around the compute as captured, or where its memory is short, around an
        order with a lower peak.
        """
        floor, search = self.task.fitting.floor, self.base.within(caps, evaluations)
        lower = floor.lowered_within(caps.memory_cap_bytes)
        if self.mover is None or lower is None:
            return search
        return replace(search.around(self.mover.moved(lower.blocks), evaluations), front=self.moved)

    def around(self, found: Found, caps: Caps, evaluations: int) -> Search:
        """Return a search around the order of ``found``."""
        search = self.base.within(caps, evaluations)
        if found.instance.arrays is search.instance.arrays:
            return search
        return replace(search.around(found.instance, evaluations), front=self.moved)

    def lowered(self, found: Found, limit_ticks: int) -> Search:
        """Return a search around ``found`` after it looked for less memory, then for fewer
        launches, within a step time.
        """
        search = self.around(found, self.task.fitting.instance.caps, self.evaluations)
        search.consider(found.candidate)
        search.lower_memory(limit_ticks)
        search.fewer_launches(limit_ticks)
        return search

    def least_memory(self, fastest_ticks: int, limit_ticks: int) -> Search:
        """Return a search around the schedule with the least memory within a step time, of as many
        with the fewest launches; ``fastest_ticks``: the least step time.

        With a slack above the default every schedule of the front is a start: one that is slower
        and smaller may not become as small as a faster one.
        """
        smallest = self.smallest(limit_ticks)
        assert smallest is not None, "the fastest is within the limit"
        starts = [smallest]
        if limit_ticks > fastest_ticks * (1 + _MOST_LEFT):
            known = (*self.base.front, *self.moved)
            starts += (f for f in known if f.candidate.figures.step_time_ticks <= limit_ticks)
        return min((self.lowered(start, limit_ticks) for start in starts), key=_memory_and_launches)

    def _with_orders(self, caps: Caps) -> None:
        """Search around the compute as captured, and around better orders of it."""
        known = self.moved.fastest(caps.memory_cap_bytes)
        search = self._around_captured(caps, self.evaluations // _SHARE_AS_CAPTURED)
        search.portfolio()
        if search.best is None:
            return
        search.improve(self.enough_ticks)
        moved_ticks = self._with_compute_moved(search)
        if moved_ticks > max(search.step_time_ticks * _WORTH_MOVING, self.enough_ticks):
            # buckets around the compute as captured may be worth as much
            self._with_buckets(caps, begun=search)
            captured = self.base.front.fastest(caps.memory_cap_bytes)
            if captured is not None:
                search = self.around(captured, caps, self.evaluations)
                search.consider(captured.candidate)
                self._with_compute_moved(search)
        self._around_known_order(caps, known)

    def _around_known_order(self, caps: Caps, known: Found | None) -> None:
        """Search around ``known``, the fastest with another order of the compute under tighter
        caps, unless that found nothing under the cap before.
        """
        if known is None or known is self.at_an_end:
            return
        search = self.around(known, caps, self.evaluations // 2)
        search.consider(known.candidate)
        search.improve(self.enough_ticks)
        self.at_an_end = known if self.moved.fastest(caps.memory_cap_bytes) is known else None

    def _with_compute_moved(self, search: Search) -> int:
        """Search around better orders of the compute than that of ``search``, for its buckets;
        return the best step time.
        """
        assert self.mover is not None
        best = search
        blocks = self.mover.blocks_of(search.instance.problem)
        for _ in range(_ROUNDS_OF_ORDERS):
            assert best.best is not None
            start = Moved(blocks=blocks, candidate=best.best)
            found = self.mover.improve(start, search.instance.caps, self.enough_ticks)
            if np.array_equal(found.blocks, blocks):
                break
            blocks = found.blocks
            around = search.around(self.mover.moved(blocks), self.evaluations // 2)
            around = replace(around, front=self.moved)
            around.consider(found.candidate)
            around.portfolio()
            around.improve(self.enough_ticks)
            if best.step_time_ticks <= around.step_time_ticks:
                break
            best = around
        return best.step_time_ticks

    def _with_shorter_tail(self, mover: ComputeMover, caps: Caps) -> None:
        """Let less of the last reduction end after the compute: from the fastest of all, and where
        nothing else moves compute from the fastest as captured.
        """
        evaluations = self.evaluations // _SHARE_OF_THE_END
        cap = caps.memory_cap_bytes
        starts = [self.fastest(cap)]
        if not self.on_path:
            starts.insert(0, self.base.front.fastest(cap))
        for start in {id(start): start for start in starts if start is not None}.values():
            search = replace(self.around(start, caps, evaluations), front=self.moved)
            search.consider(start.candidate)
            worth = int(search.step_time_ticks * self.task.options.time_slack)
            with_shorter_tail(mover, search, worth, evaluations, self.enough_ticks)


def _memory_and_launches(search: Search) -> tuple[int, int, int]:
    assert search.best is not None
    time_ticks, peak_bytes, num_launches = search.best.value
    return peak_bytes, num_launches, time_ticks
