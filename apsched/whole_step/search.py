"""Choose the kept parameters: solve forward and backward under one memory cap for common choices,
then along the order in which keeping pays.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from apsched.errors import SelfCheckError
from apsched.graph.garbage import rare_garbage_collection
from apsched.names import block_of, name_of
from apsched.names import in_node as in_node_entry
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.bounds.whole_step import StepBound
from apsched.whole_step.bounds import bounds_of, prices_of
from apsched.whole_step.choices import (
    NONE,
    Choice,
    Parameter,
    decided_alike,
    kept_in_node,
    kept_whole,
    named_choices,
    splits,
    units,
)
from apsched.whole_step.improve import NEVER, improved, ticks_of
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import SolvedChoice, Step

_FEW = 3
"""Of so many parameters every choice is solved that may pay."""
_FIRST = 4
"""Prefixes of the order that are looked at first, evenly spaced."""
_ROUNDS = 4
"""Rounds of halving around the best of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedChoice:
    """A choice that is not solved, since its bound is no lower than the step time of another."""

    kept: Choice
    kept_bytes: int
    bound: TimeBound


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLargeChoice:
    """A choice that is not solved, since its kept parameters do not fit the memory."""

    kept: Choice
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """The kept parameters, and the figures of the step."""

    best: SolvedChoice
    bound: TimeBound
    """No choice and no schedules within the caps are faster, as long as no choice prices a node
    lower than each choice that was solved does.
    """
    baselines: dict[str, SolvedChoice]
    """The choices that people make, by name, as far as they may fit and were solved."""
    excluded: dict[str, ExcludedChoice]
    """Those that the bound shows to be no faster than ``best``, which are not solved."""
    tried: tuple[SolvedChoice, ...]
    """All solved choices, in order."""
    num_parameters: int
    """Gathered in both graphs: kept or gathered again."""
    cap_bytes: int | None
    """The lower of both graphs."""
    too_large: dict[str, TooLargeChoice] = field(default_factory=dict)
    """The other choices that people make: no schedule keeps the memory cap."""
    names: tuple[str, ...] = ()
    """Names of these parameters."""
    num_by_rule: int = 0
    """Parameters that a rule of the plan decides on."""

    @property
    def gap(self) -> float:
        """(step time - bound) / step time."""
        ticks = self.best.step_ticks
        return (ticks - self.bound.ticks) / ticks if ticks else 0.0

    @property
    def frontier(self) -> tuple[SolvedChoice, ...]:
        """Of the choices solved those that no other beats in both step time and peak, by peak."""
        found: list[SolvedChoice] = []
        fitting = (choice for choice in self.tried if choice.fits)
        for choice in sorted(fitting, key=lambda c: (c.peak_bytes, c.step_ticks, len(c.kept))):
            if not found or choice.step_ticks < found[-1].step_ticks:
                found.append(choice)
        return tuple(found)


def solve_choice(step: Step, request: KeepRequest, label: str = "--keep") -> StepAnswer:
    """Return the answer to the request: the choice found, or the stated one with the bound of its
    own graphs.
    """
    if request.mode == AUTO:
        return solve_step(step)
    chosen = request.chosen(step.entries, label)
    step = step.above_floor_of(step.pairs_of(chosen))
    best = step.solve(chosen)
    return StepAnswer(
        best=best,
        bound=TimeBound(
            ticks=sum(result.answer.bound_ticks for result in best.results),
            source=" and ".join(result.answer.bound_source for result in best.results),
        ),
        baselines={},
        excluded={},
        tried=(best,),
        num_parameters=len(step.parameters),
        names=tuple(p.name for p in step.parameters),
        cap_bytes=min((cap for cap in step.cap_bytes if cap is not None), default=None),
    )


@rare_garbage_collection()
def solve_step(step: Step) -> StepAnswer:
    """Return the fastest choice found, never slower than one that people make and that fits: each
    of these is solved, or excluded by its bound, as far as :attr:`StepAnswer.bound` holds.

    If none fits, ``best`` is that with all gathered again, without a schedule. Of choices whose
    step times differ by less than the time slack the one with the lowest peak is taken, as long as
    no common choice becomes faster.
    """
    prices, known = None, prices_of(step)
    while prices != known:  # a choice that was solved fuses a node as neither extreme does
        prices = known
        answer = search_choices(step, bounds_of(step, prices))
        known = prices_of(step)
    check_bound(answer.bound.ticks, answer.best.step_ticks if answer.best.fits else None)
    return answer


def search_choices(step: Step, bounds: Sequence[StepBound]) -> StepAnswer:
    """As :func:`solve_step`; of ``bounds`` the least holds. It is not checked."""
    search = _Search(step, bounds)
    baselines, excluded = search.baselines()
    if len(step.undecided) <= _FEW:
        search.look(search.every_choice())
    else:
        search.look(search.densest())
        search.along_order()
        search.look(search.filled())
        search.look(search.needed_first())
    best = improved(step.solved, step.solve, lambda: _least_memory_within_slack(step, baselines))
    return StepAnswer(
        best=best,
        bound=search.bound,
        baselines={name: step.solved[kept] for name, kept in baselines.items()},
        excluded=excluded,
        too_large=search.too_large(),
        tried=tuple(step.solved.values()),
        num_parameters=len(step.parameters),
        names=tuple(p.name for p in step.parameters),
        num_by_rule=len(step.parameters) - len(step.undecided),
        cap_bytes=min((cap for cap in step.cap_bytes if cap is not None), default=None),
    )


class _Search:
    """Choices that are worth solving: bounds tell which may fit, and which may be faster."""

    def __init__(self, step: Step, bounds: Sequence[StepBound]) -> None:
        self._step, self._bounds = step, bounds
        self._index = {p.name: k for k, p in enumerate(step.undecided)}
        self._units = units(step.undecided)
        self._order = [alike for unit in self._units for alike in unit]
        self._entry_bytes = step.entry_bytes
        self._cap_bytes = min((cap for cap in step.cap_bytes if cap is not None), default=None)
        self.bound = min((b.over_choices() for b in bounds), key=lambda bound: bound.ticks)
        self._saved = [bound.saved_ticks for bound in bounds]
        self._enough = self.bound.ticks * (1 + step.request.options.time_slack / 2)

    def may_fit(self, kept: Choice) -> bool:
        """Return whether memory may hold the choice ``kept`` between forward and backward."""
        whole, in_node = self._items(kept_whole(kept)), self._items(kept_in_node(kept))
        return any(bound.may_fit(whole, in_node) for bound in self._bounds)

    def _items(self, kept: Choice) -> list[int]:
        """Return the parameters of ``kept`` that no rule decides on, as bounds number them."""
        names = set(map(name_of, kept))
        return [self._index[name] for name in names if name in self._index]

    def baselines(self) -> tuple[dict[str, Choice], dict[str, ExcludedChoice]]:
        """Return the choices that people make: those that it solves, and those that their bound
        excludes. The ones with the least bound come first, so that it excludes most.
        """
        step, made = self._step, self._made_by_people()
        solved: set[str] = set()
        excluded: dict[str, ExcludedChoice] = {}
        for name in sorted(made, key=lambda name: (name != NONE, self._bound_of(made[name]).ticks)):
            kept = made[name]
            if name != NONE and not self.may_fit(kept):
                continue
            bound = self._bound_of(kept)
            if kept in step.solved or name == NONE or bound.ticks < _best_ticks(step):
                step.search(kept)
                solved.add(name)
            else:
                size = self._size_of(kept)
                excluded[name] = ExcludedChoice(kept=kept, kept_bytes=size, bound=bound)
        return {name: kept for name, kept in made.items() if name in solved}, excluded

    def too_large(self) -> dict[str, TooLargeChoice]:
        """Return the choices that people make and that the memory cannot hold."""
        return {
            name: TooLargeChoice(kept=kept, kept_bytes=self._size_of(kept))
            for name, kept in self._made_by_people().items()
            if name != NONE and not self.may_fit(kept)
        }

    def _made_by_people(self) -> dict[str, Choice]:
        named = named_choices(self._step.undecided).items()
        return {name: c | self._step.always for name, c in named if not splits(c, self._order)}

    def _size_of(self, kept: Choice) -> int:
        return sum(self._entry_bytes[entry] for entry in kept)

    def _bound_of(self, kept: Choice) -> TimeBound:
        whole, in_node = self._items(kept_whole(kept)), self._items(kept_in_node(kept))
        return min(
            (b.of_choice(whole, in_node) for b in self._bounds), key=lambda bound: bound.ticks
        )

    def look(self, choices: Iterable[Choice]) -> None:
        """Solve those of ``choices`` that may be the fastest, until the bound is near."""
        for kept in choices:
            self._ticks_of(kept)

    def _ticks_of(self, kept: Choice) -> float:
        """Return the step time of a choice; never, where it cannot be the fastest."""
        step = self._step
        if kept not in step.solved:
            best = _best_ticks(step)
            if best <= self._enough or not self.may_fit(kept) or self._bound_of(kept).ticks >= best:
                return NEVER
        return ticks_of(step.search(kept))

    def _should_fit(self, kept: Choice) -> bool:
        """Return whether the choice ``kept`` may fit, and is expected to: the least memory of a
        choice grows with the bytes that are kept, by as much as in those that were solved.
        """
        step, cap = self._step, self._cap_bytes
        if not self.may_fit(kept):
            return False
        if cap is None:
            return True
        known = [
            (solved.least_bytes, solved.kept_bytes)
            for solved in (step.search(step.always), *step.solved.values())
        ]
        least, of_rules = known[0]
        slopes = [(size - least) / (of - of_rules) for size, of in known if of > of_rules]
        more = self._size_of(kept) - of_rules
        return least + min((1.0, *slopes)) * more <= cap

    def every_choice(self) -> Iterator[Choice]:
        """Yield all choices, those with the fewest kept parameters first."""
        options = [((), *_entries(alike)) for alike in decided_alike(self._step.undecided)]
        choices = [tuple(chain.from_iterable(chosen)) for chosen in product(*options)]
        for entries in sorted(choices, key=len):
            yield self._step.always.union(entries)

    def along_order(self) -> None:
        """Solve prefixes of the order in which keeping pays. The rest is gathered again, or
        resharded in the node if all fit so and gain. If not, prefixes are resharded, too.
        """
        whole = [alike for alike in self._order if all(p.node_bytes for p in alike)]
        in_node = {name: in_node_entry(name) for name in _names(whole)}
        entries = self._step.always.union(in_node.values())
        again, resharded = self._ticks_of(self._step.always), self._ticks_of(entries)
        if in_node and resharded < again:
            self._prefixes(lambda name: name, lambda name: in_node.get(name, ""))
            return
        self._prefixes(lambda name: name, lambda name: "")
        if in_node and resharded == NEVER:
            self._prefixes(lambda name: in_node.get(name, ""), lambda name: "")

    def _prefixes(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        """Solve choices with the entry ``first`` of each parameter in a prefix of the order, and
        the entry ``rest`` of the others: some prefixes all over it, then around the best, between
        units first and inside of one at last.

        Where the whole order fits, a prefix of it only loses time: shorter ones are looked at, for
        their lower peak, as long as they lose no more than the time slack.
        """
        ends = [0]
        for unit in self._units:
            ends.append(ends[-1] + len(unit))
        known: dict[int, float] = {}

        def choice(k: int) -> Choice:
            entries = (
                *map(first, _names(self._order[:k])),
                *map(rest, _names(self._order[k:])),
            )
            return self._step.always.union(filter(None, entries))

        def look(at: Iterable[int]) -> None:
            for k in sorted(set(at) - known.keys()):
                known[k] = self._ticks_of(choice(k))

        most = bisect_right(
            range(1, ends[-1] + 1), 0, key=lambda k: not self._should_fit(choice(k))
        )
        last = bisect_right(ends, most) - 1
        inside = [ends[round(last * k / _FIRST)] for k in range(1, _FIRST)]
        look((0, most))
        for k in reversed(inside):
            look((k,))
            if known.get(ends[-1], NEVER) != NEVER and not self._is_near(known[k]):
                break
        for _ in range(_ROUNDS):
            best = min(known, key=lambda k: (known[k], k))
            look([_between(ends, *sorted((best, k))) for k in self._sides(known, best)])

    def _sides(self, known: Mapping[int, float], best: int) -> list[int]:
        """Return the neighbours of ``best`` towards which a faster prefix may lie: those that do
        not fit, and those on both sides that are noticeably slower. From the shortest or the
        longest prefix of all, time is expected to rise with the distance.
        """
        sides = (
            max((k for k in known if k < best), default=None),
            min((k for k in known if k > best), default=None),
        )
        found = [k for k in sides if k is not None]
        return [
            k
            for k in found
            if known[k] == NEVER or (len(found) == 2 and not self._is_near(known[k], 0.5))
        ]

    def _is_near(self, ticks: float, share: float = 1.0) -> bool:
        """Return whether a step time is within ``share`` of the time slack of the best."""
        slack = share * self._step.request.options.time_slack
        return ticks <= _best_ticks(self._step) * (1 + slack)

    def filled(self) -> Iterator[Choice]:
        """Yield the best choice with more parameters kept or resharded, as far as they are expected
        to fit, in the order in which keeping pays and the largest first; and the largest alone.
        """
        best = min(self._step.solved.values(), key=ticks_of).kept
        largest = sorted(self._order, key=lambda alike: -sum(p.size_bytes for p in alike))
        least = self._step.always
        for start, order in ((best, self._order), (best, largest), (least, largest)):
            yield from self._filled_with(start, order)

    def needed_first(self) -> Iterator[Choice]:
        """Yield the block that backward needs first, then one more block each time, as long as that
        is the fastest choice: they may be alive at the peak anyway, and need less memory than
        expected.
        """
        blocks: dict[str, list[Parameter]] = {}
        for p in sorted(self._step.undecided, key=lambda p: p.need):
            blocks.setdefault(block_of(p.name) or p.name, []).append(p)
        kept = self._step.always
        for members in blocks.values():
            kept = kept.union(p.name for p in members)
            if splits(kept, self._order):
                continue
            yield kept
            if min(self._step.solved.values(), key=ticks_of).kept != kept:
                return

    def densest(self) -> Iterator[Choice]:
        """Yield the parameters that save the most time per byte, kept or resharded, as far as they
        are expected to fit.
        """
        order = sorted(self._order, key=self._ticks_per_byte, reverse=True)
        yield from self._filled_with(self._step.always, order)

    def _filled_with(self, start: Choice, order: Sequence[Sequence[Parameter]]) -> Iterator[Choice]:
        """Yield the choice ``start`` with more parameters in that order: kept, and resharded."""
        ways = [_entries(alike) for alike in order]
        yield self._with_more(start, [whole for whole, *_ in ways])
        if parts := [part for _, *others in ways for part in others]:
            yield self._with_more(start, parts)

    def _ticks_per_byte(self, alike: Sequence[Parameter]) -> float:
        """Return the time per byte that keeping the parameters ``alike`` saves, by the bound."""
        items = [self._index[p.name] for p in alike]
        saved = max(sum(values[i] for i in items) for values in self._saved)
        return saved / sum(p.size_bytes for p in alike)

    def _with_more(self, start: Choice, entries: Iterable[tuple[str, ...]]) -> Choice:
        """Return ``start`` with those of ``entries``, those that are decided on alike together,
        that memory may hold.
        """
        kept = start
        for together in entries:
            names = set(map(name_of, together))
            more = kept - set(map(in_node_entry, names)) | set(together)
            if not names & kept and self._should_fit(more):
                kept = more
        return kept


def _names(order: Iterable[Sequence[Parameter]]) -> Iterator[str]:
    return (p.name for alike in order for p in alike)


def _entries(alike: Sequence[Parameter]) -> list[tuple[str, ...]]:
    """Return the entries that keep the parameters ``alike`` whole, and those that reshard them in
    their node, if all can be.
    """
    whole = tuple(p.name for p in alike)
    in_node = tuple(map(in_node_entry, whole))
    return [whole, in_node] if all(p.node_bytes for p in alike) else [whole]


def _between(ends: Sequence[int], low: int, high: int) -> int:
    """Return the middle one of the ends of units between both; of one unit the middle itself."""
    inside = [end for end in ends if low < end < high]
    return inside[len(inside) // 2] if inside else (low + high) // 2


def _best_ticks(step: Step) -> float:
    return min(map(ticks_of, step.solved.values()), default=NEVER)


def _least_memory_within_slack(step: Step, baselines: Mapping[str, Choice]) -> SolvedChoice:
    fitting = [solved for solved in step.solved.values() if solved.fits]
    if not fitting:
        return step.solve(baselines[NONE])  # with the reasons
    least = min(solved.step_ticks for solved in fitting)
    limit = min(
        int(least * (1 + step.request.options.time_slack)),
        min((s.step_ticks for s in fitting if s.kept in baselines.values()), default=least),
    )
    near = (solved for solved in fitting if solved.step_ticks <= max(limit, least))
    return min(near, key=lambda s: (s.peak_bytes, s.step_ticks, len(s.kept), sorted(s.kept)))


def check_bound(bound_ticks: int, step_ticks: int | None) -> None:
    """Raise SelfCheckError where the bound lies above the step time that was found, if any."""
    if step_ticks is not None and bound_ticks > step_ticks:
        raise SelfCheckError(
            f"the bound of {bound_ticks} ticks on the whole step lies above the step time of"
            f" {step_ticks}, a bug of apsched: solve without keeping parameters"
        )
