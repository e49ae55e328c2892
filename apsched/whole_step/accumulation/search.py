"""Choose the parameters that are kept in a step of several micro-batches in a row, those that stay
gathered from one micro-batch to the next, and those whose gradients are reduced once.

The choices are those of people, and those with the least bound (a linear program) that leave some
memory free: the more is left, the more room has prefetch. Parameters of a transformer block are
decided on alike.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile, product

from apsched.errors import SelfCheckError
from apsched.problem.problem import Problem
from apsched.solver.bounds.accumulation import (
    HELD,
    KEPT,
    KINDS,
    SHARDS,
    SUMMED,
    AccumulationBound,
)
from apsched.solver.bounds.accumulation import IN_NODE as SHARED
from apsched.solver.bounds.accumulation import Graphs as BoundGraphs
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.bounds.whole_step import least_prices, with_prices
from apsched.whole_step.accumulation.step import Accumulation, SolvedAccumulation
from apsched.whole_step.accumulation.units import units_of
from apsched.whole_step.bounds import grouped
from apsched.whole_step.choices import NONE, Choice, named_choices
from apsched.whole_step.improve import NEVER, improved, ticks_of
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Graphs

_FEW = 2
"""Of so many units every choice is solved that may pay."""
_FIRST = 4
"""Amounts of spare memory that are looked at first, beside none."""
_ROUNDS = 3
"""Rounds of halving around the best of them."""
_INSTEAD = {KEPT: SHARED, SUMMED: SHARDS, SHARDS: SUMMED}
"""Kind of a choice -> the kind that takes its place."""
_FILLED = (SUMMED, SHARDS, KEPT, HELD)
_SOME_KEPT = ("last_block", "fsdp2", "threshold")
Units = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedAccumulation:
    """A choice that was not solved: its bound is not below the step time of another."""

    kept: Choice
    bound_ticks: int
    """Of :class:`AccumulationBound`, at the prices of the choices solved before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationAnswer:
    """The choice for a step of several micro-batches, and its figures."""

    num_micro_batches: int
    best: SolvedAccumulation
    bound: TimeBound
    """No choice and no schedules within the caps are faster, as long as no choice prices a node
    lower than each choice that was solved does.
    """
    baselines: dict[str, SolvedAccumulation]
    """The choices that people make and that were solved, by name, as far as they may fit."""
    excluded: dict[str, ExcludedAccumulation]
    """Those of them that the bound excludes."""
    tried: tuple[SolvedAccumulation, ...]
    entries: tuple[str, ...]
    """All entries that a choice may have."""
    cap_bytes: int | None
    """The lower of both graphs."""

    @property
    def gap(self) -> float:
        """(step time - bound) / step time."""
        ticks = self.best.step_ticks
        return (ticks - self.bound.ticks) / ticks if ticks else 0.0


def solve_accumulation(
    accumulation: Accumulation, request: KeepRequest, label: str = "--keep"
) -> AccumulationAnswer:
    """Return the answer to the request: the choice found, or the stated one with the bound of its
    own graphs.
    """
    if request.mode != AUTO:
        chosen = request.chosen(accumulation.entries, label)
        accumulation = accumulation.above_floor_of(chosen)
        best = accumulation.solve(chosen)
        bound = TimeBound(
            ticks=best.bound_ticks, source=best.pairs[-1].results[-1].answer.bound_source
        )
        baselines: dict[str, SolvedAccumulation] = {}
        excluded: dict[str, ExcludedAccumulation] = {}
    else:
        search = _Search(accumulation)
        baselines, excluded = search.baselines()
        search.look()
        best = search.best(baselines, excluded)
        baselines = {name: accumulation.solved[one.kept] for name, one in baselines.items()}
        bound = search.bound()
    caps_bytes = [cap for cap in accumulation.step.cap_bytes if cap is not None]
    answer = AccumulationAnswer(
        num_micro_batches=accumulation.num_micro_batches,
        best=best,
        bound=bound,
        baselines=baselines,
        excluded=excluded,
        tried=tuple(accumulation.solved.values()),
        entries=accumulation.entries,
        cap_bytes=min(caps_bytes, default=None),
    )
    if best.fits and bound.ticks > best.step_ticks:
        raise SelfCheckError(
            f"the bound of {bound.ticks} ticks on the micro-batches lies above the step time of"
            f" {best.step_ticks}, a bug of apsched: solve without --accumulate"
        )
    return answer


def solve_baselines(
    accumulation: Accumulation, names: Collection[str] | None = None
) -> dict[str, SolvedAccumulation]:
    """Return the choices that people make, solved, by name, as far as they may fit; with ``names``
    those of these names.
    """
    choices = _Search(accumulation).choices_of_people()
    return {
        name: accumulation.solve(choice)
        for name, choice in choices.items()
        if names is None or name in names
    }


class _Search:
    """Choices that are worth solving: the bound tells which may fit, and which may be faster."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._of, self._step = accumulation, accumulation.step
        with self._step.progress.stage("bound over all choices"):
            self._units, self._names = units_of(accumulation)
            self._prices, self._bound = self._made_bound()
        self._known: dict[Choice, Units] = {}
        """Choices that were looked at, as units."""

    def bound(self) -> TimeBound:
        """Return the bound, at the least prices of all graphs that were made."""
        if self._least_prices() != self._prices:
            with self._step.progress.stage("bound over all choices again"):
                self._prices, self._bound = self._made_bound()
        return self._bound.over_choices()

    def baselines(self) -> tuple[dict[str, SolvedAccumulation], dict[str, ExcludedAccumulation]]:
        """Return the choices that people make, as far as they may fit: those that it solves, and
        those that their bound excludes. The ones with the least bound come first, so that it
        excludes most; ``none`` is always solved.
        """
        made = self._made_by_people()
        bounds = {name: self._bound.of_choice(units) for name, units in made.items()}
        solved: dict[str, SolvedAccumulation] = {}
        excluded: dict[str, ExcludedAccumulation] = {}
        for name in sorted(made, key=lambda name: (name != NONE, bounds[name])):
            choice = self._choice(made[name])
            known = name == NONE or choice in self._of.solved
            if known or bounds[name] < self._best_ticks():
                solved[name] = self._solved(made[name])
            else:
                excluded[name] = ExcludedAccumulation(kept=choice, bound_ticks=bounds[name])
        return {name: solved[name] for name in made if name in solved}, excluded

    def choices_of_people(self) -> dict[str, Choice]:
        """Return the choices that people make, by name, as far as they may fit."""
        return {name: self._choice(units) for name, units in self._made_by_people().items()}

    def _made_by_people(self) -> dict[str, Units]:
        """Return the choices that people make, as units.

        ``none``          each micro-batch by itself: gathered twice, reduced
        ``kept``          parameters kept from forward to backward (SHARD_GRAD_OP)
        ``no_sync``       gradients reduced once (``set_requires_gradient_sync(False)``)
        ``no_sync_kept``  both
        ``once``          gathered once (``set_reshard_after_backward(False)``) and reduced once
        ``shards_kept``   parameters kept, and of HSDP shards of gradients all-reduced once
                          (``set_requires_all_reduce(False)``)
        ``last_block``, ``fsdp2``, ``threshold``
                          some parameters kept, as :func:`apsched.whole_step.choices.named_choices`
        """
        every = self._all()
        made = {
            NONE: {},
            "kept": {KEPT: every[KEPT]},
            "no_sync": {SUMMED: every[SUMMED]},
            "no_sync_kept": {KEPT: every[KEPT], SUMMED: every[SUMMED]},
            "once": {kind: every[kind] for kind in (KEPT, HELD, SUMMED)},
        }
        if every[SHARDS]:
            made["shards_kept"] = {KEPT: every[KEPT], SHARDS: every[SHARDS]}
        for name, choice in named_choices(self._step.undecided).items():
            if name in _SOME_KEPT and (units := self._units_kept(choice)):
                made[name] = {KEPT: units}
        return {
            name: _full(units)
            for name, units in made.items()
            if name == NONE or self._bound.may_fit(_full(units))
        }

    def _units_kept(self, choice: Choice) -> frozenset[int]:
        """Return the units that ``choice`` keeps; none where it has a part of one."""
        names = [set(entries.get(KEPT, ())) for entries in self._names]
        units = frozenset(u for u, own in enumerate(names) if own and own <= choice)
        return units if choice == {name for u in units for name in names[u]} else frozenset()

    def look(self) -> None:
        """Solve the choices that may be the fastest: all where units are few, else those that treat
        all units alike and those with the least bound that leave memory free.
        """
        few = len(self._units) <= _FEW
        for units in self._every() if few else self._corners():
            self._ticks_of(units)
        if not few:
            free = [size for size in self._of.free_bytes if size is not None]
            for as_many in (False, True):
                self._along_memory(max(min(free, default=0), 0), as_many=as_many)
            while self._filled():
                pass

    def _every(self) -> list[Units]:
        """Return all choices, those with the least bound first."""
        options = []
        for unit in self._units:
            keeps = ("", *(kind for kind in (KEPT, SHARED) if kind in unit.least_bytes))
            others = (
                ("", *(kind for kind in kinds if kind in unit.least_bytes))
                for kinds in ((HELD,), (SUMMED, SHARDS))
            )
            options.append(list(product(keeps, *others)))
        found = [
            {
                kind: frozenset(u for u, kinds in enumerate(chosen) if kind in kinds)
                for kind in KINDS
            }
            for chosen in product(*options)
        ]
        return sorted(found, key=self._bound.of_choice)

    def _corners(self) -> list[Units]:
        """Return all choices that treat all units alike, those with the least bound first."""
        every = self._all()
        keeps: list[dict[str, frozenset[int]]] = [{}, {KEPT: every[KEPT]}]
        if every[SHARED]:
            whole = every[KEPT] - every[SHARED]
            keeps.append({SHARED: every[SHARED], KEPT: whole})
        sums: list[dict[str, frozenset[int]]] = [{}, {SUMMED: every[SUMMED]}]
        if every[SHARDS]:
            sums.append({SHARDS: every[SHARDS], SUMMED: every[SUMMED] - every[SHARDS]})
            sums.append({SHARDS: every[SHARDS]})
        found = [
            {**keep, HELD: held, **summed}
            for keep in keeps
            for held in (frozenset[int](), every[HELD])
            for summed in sums
        ]
        full = [_full(units) for units in found]
        return sorted(full, key=self._bound.of_choice)

    def _along_memory(self, room: int, *, as_many: bool) -> None:
        """Solve the choices with the least bound that leave memory free: some amounts between none
        and ``room`` first, then around the best.
        """
        known: dict[int, float] = {}

        def look(spares: Iterable[int]) -> None:
            for spare in sorted(set(spares) - known.keys()):
                known[spare] = self._ticks_of(self._bound.best_for(spare, as_many=as_many))

        look(room * k // _FIRST for k in range(_FIRST))
        for _ in range(_ROUNDS if room else 0):
            best = min(known, key=lambda spare: (known[spare], spare))
            around = (
                max((k for k in known if k < best), default=best),
                min((k for k in known if k > best), default=best),
            )
            look((best + other) // 2 for other in around)

    def _filled(self) -> bool:
        """Solve the fastest choice with more units of one kind, as many as memory may hold, a half,
        a quarter ... of them, until one is faster; at last whole sums in place of sums of shards,
        from the first and from the last one on. If none is faster, those behind a unit that
        exceeds the memory by itself are tried. Return whether one is faster.
        """
        before = self._best_ticks()
        best = min(
            self._known, key=lambda choice: (ticks_of(self._of.solved[choice]), sorted(choice))
        )
        units = self._known[best]
        others = {kind: units[other] for kind, other in _INSTEAD.items()}
        free = {kind: self._all()[kind] - units[kind] for kind in _FILLED}
        ways = [(kind, free[kind] - others.get(kind, frozenset()), 1) for kind in _FILLED]
        ways += [(SUMMED, free[SUMMED] & others[SUMMED], step) for step in (1, -1)]
        tries = [(kind, self._more(units, kind, among, step)) for kind, among, step in ways]
        while any(more for _, more in tries):
            for kind, more in tries:
                count = len(more)
                while count:
                    if self._ticks_of(_with_more(units, kind, more[:count])) < before:
                        return True
                    count //= 2
            tries = [(kind, self._without_refused(units, kind, more)) for kind, more in tries]
        return False

    def _more(self, units: Units, kind: str, among: frozenset[int], step: int) -> list[int]:
        """Return those units ``among`` some that memory may hold as ``kind``, too, in the order in
        which it pays, or from its end with a ``step`` of -1.
        """
        found: list[int] = []
        for u in sorted(among, key=lambda u: (self._units[u].order[kind], u))[::step]:
            if self._bound.may_fit(_with_more(units, kind, [*found, u])):
                found.append(u)
        return found

    def _without_refused(self, units: Units, kind: str, more: list[int]) -> list[int]:
        """Return the rest of ``more`` where its first unit exceeds the memory by itself: without
        that one and those of its size that follow it. Else return none.
        """
        alone = self._of.solved.get(self._choice(_with_more(units, kind, more[:1])))
        if not more or alone is None or alone.fits:
            return []
        size = self._units[more[0]].least_bytes[kind]
        return list(dropwhile(lambda u: self._units[u].least_bytes[kind] == size, more))

    def best(
        self,
        baselines: Mapping[str, SolvedAccumulation],
        excluded: Mapping[str, ExcludedAccumulation],
    ) -> SolvedAccumulation:
        """Return the best choice, after those are solved with CP-SAT that it may make the fastest,
        the fastest first.
        """
        of_people = {one.kept for one in baselines.values()}
        ticks = min((one.bound_ticks for one in excluded.values()), default=NEVER)
        solve = partial(self._of.solve, is_whole=False)
        return improved(self._of.solved, solve, lambda: self._smallest_of_best(of_people, ticks))

    def _smallest_of_best(
        self, of_people: Collection[Choice], excluded_ticks: float
    ) -> SolvedAccumulation:
        """Return the choice with the lowest peak among those within the time slack, never slower
        than a baseline that fits; the choice ``none`` if no choice fits.
        """
        fitting = [solved for solved in self._of.solved.values() if solved.fits]
        if not fitting:
            return self._of.solve(self._step.always)
        least = min(solved.step_ticks for solved in fitting)
        theirs = (s.step_ticks for s in fitting if s.kept in of_people)
        limit = max(
            min(
                least * (1 + self._step.request.options.time_slack),
                min(theirs, default=least),
                excluded_ticks,
            ),
            least,
        )
        near = (solved for solved in fitting if solved.step_ticks <= limit)
        return min(near, key=lambda s: (s.peak_bytes, s.step_ticks, sorted(s.kept)))

    def _solved(self, units: Units) -> SolvedAccumulation:
        choice = self._choice(units)
        self._known[choice] = units
        return self._of.search(choice)

    def _ticks_of(self, units: Units) -> float:
        """Return the step time of a choice; infinity if the bound shows that it cannot be the
        fastest.
        """
        choice = self._choice(units)
        if choice not in self._of.solved and (
            not self._bound.may_fit(units) or self._bound.of_choice(units) >= self._best_ticks()
        ):
            return NEVER
        return ticks_of(self._solved(units))

    def _best_ticks(self) -> float:
        return min(map(ticks_of, self._of.solved.values()), default=NEVER)

    def _choice(self, units: Units) -> Choice:
        entries = (
            entry for kind, us in units.items() for u in us for entry in self._names[u][kind]
        )
        return self._step.always.union(entries)

    def _all(self) -> dict[str, frozenset[int]]:
        return {
            kind: frozenset(u for u, unit in enumerate(self._units) if kind in unit.least_bytes)
            for kind in KINDS
        }

    def _least_prices(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the least price of each node of forward and of backward, in the graphs with the
        fewest collectives, in those with the most, and in those that were solved.
        """
        solved = (pair.graphs for one in self._of.solved.values() for pair in one.pairs)
        pairs = [self._step.least, *self._fewest(), *solved]
        forward, backward = ([pair[k].problem for pair in pairs] for k in (0, 1))
        kinds = self._of.sums, self._of.shard_sums
        reductions = (one for sums in kinds for ones in sums.values() for one in ones)
        chains = {one.sum_name: one.chain for one in reductions}
        return least_prices(forward), least_prices(backward, chains)

    def _fewest(self) -> tuple[Graphs, ...]:
        """Return the graphs that share everything."""
        every = self._all()
        return self._of.graphs_of(
            self._choice({kind: every[kind] for kind in (KEPT, HELD, SUMMED)})
        )

    def _made_bound(self) -> tuple[tuple[dict[str, int], dict[str, int]], AccumulationBound]:
        """Return the least prices, and the bound at these."""
        prices, few = self._least_prices(), self._fewest()
        again = [graph.problem for graph in self._step.least]
        kept = self._step.under(self._choice({KEPT: self._all()[KEPT]}))[1].problem

        def ways(captured: Problem, least: Problem, k: int) -> list[BoundGraphs]:
            found = []
            for second in sorted({False, self._step.request.second_group}):
                one, other = (
                    grouped(with_prices(problem, prices[k]), second)
                    for problem in (captured, least)
                )
                found.append(BoundGraphs(captured=one, least=other))
            return found

        bound = AccumulationBound.of(
            self._of.num_micro_batches,
            self._units,
            forward=ways(again[0], few[-1][0].problem, 0),
            backward=ways(again[1], few[0][1].problem, 1),
            last=ways(again[1], kept, 1),
            prices=prices[1],
            caps=replace(self._step.request.caps, memory_cap_bytes=None),
            free_bytes=self._of.free_bytes,
        )
        return prices, bound


def _with_more(units: Units, kind: str, more: Collection[int]) -> Units:
    """Return ``units`` with ``more`` of one kind, in place of the kind that it excludes."""
    changed = {**units, kind: units[kind].union(more)}
    if kind in _INSTEAD:
        changed[_INSTEAD[kind]] = units[_INSTEAD[kind]].difference(more)
    return changed


def _full(units: Mapping[str, frozenset[int]]) -> Units:
    return {kind: units.get(kind, frozenset()) for kind in KINDS}
