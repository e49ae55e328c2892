"""A step of several micro-batches in a row under one choice: graphs, problems and solved schedules.

The choice of a step has entries of three more kinds: ``NAME @next``, a parameter that stays
gathered from backward to the next forward; ``NAME @sum``, a parameter whose gradients are added and
reduced once; and ``NAME @sum-shards``, a parameter of HSDP whose gradients are reduced to shards
each time, which are added and all-reduced once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from apsched.config import Caps
from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.names import IN_NODE, NEXT, SUM, SUM_SHARDS, mark_of, marked, name_of
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import (
    SolveRequest,
    completed,
    lowered,
    solve_on_one_device,
)
from apsched.quantities import MemoryCap
from apsched.solver.interleave.least_memory import exceeds_memory_cap
from apsched.units import allocated_bytes
from apsched.whole_step.choices import Choice
from apsched.whole_step.pair import CountedPair, Graphs, Step, priced_as

if TYPE_CHECKING:
    from apsched.fx.accumulate import HeldValue, Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPair(CountedPair):
    """Forward and backward of some of the micro-batches, solved."""

    results: tuple[Result, Result]

    @property
    def ticks(self) -> int:
        """Of one of the micro-batches."""
        return sum(r.best.step_time_ticks for r in self.results if r.best is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedAccumulation:
    """All micro-batches of a step under one choice, solved."""

    kept: Choice
    pairs: tuple[SolvedPair, ...]
    """The first, those in the middle, and the last micro-batch; equal ones once."""
    is_whole: bool = True
    """Whether all graphs are solved; without that one of them has no schedule within the caps, and
    ``pairs`` are those that were solved.
    """
    is_too_large: bool = False
    """Whether a lower bound of the memory of one graph exceeds its cap."""

    @property
    def results(self) -> tuple[Result, ...]:
        """The answers for all graphs, each once."""
        found = (result for pair in self.pairs for result in pair.results)
        return tuple({result.problem.name: result for result in found}.values())

    @property
    def graphs(self) -> tuple[LoadedGraph, ...]:
        """All graphs, each once, in the order of ``results``."""
        found = (graph for pair in self.pairs for graph in pair.graphs)
        return tuple({graph.problem.name: graph for graph in found}.values())

    @property
    def may_improve(self) -> bool:
        """Whether CP-SAT was left out, which may find faster schedules."""
        return not self.is_too_large and any(r.answer.may_improve for r in self.results)

    @property
    def is_final(self) -> bool:
        """Whether nothing was left out of the answers, as a search alone does."""
        return self.is_too_large or all(r.answer.is_final for r in self.results)

    @property
    def bound_ticks(self) -> int:
        """No schedules of these graphs are faster."""
        return sum(p.count * r.answer.bound_ticks for p in self.pairs for r in p.results)

    @property
    def fits(self) -> bool:
        """Whether all graphs have a schedule within the caps."""
        return self.is_whole and all(result.best is not None for result in self.results)

    @property
    def step_ticks(self) -> int:
        """All micro-batches, one after the other."""
        return sum(pair.count * pair.ticks for pair in self.pairs)

    @property
    def least_bytes(self) -> int:
        """The least memory for which schedules of all graphs are known."""
        return max(
            result.answer.floor_memory_bytes + beside
            for pair in self.pairs
            for result, beside in zip(pair.results, pair.beside_bytes, strict=True)
        )

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all graphs."""
        return max(
            result.best.peak_memory_bytes + beside if result.best else 0
            for pair in self.pairs
            for result, beside in zip(pair.results, pair.beside_bytes, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """A step of ``num_micro_batches``: that of one, and the parameters that may stay gathered or
    whose gradients may be added.
    """

    step: Step
    num_micro_batches: int
    held: "Mapping[str, tuple[HeldValue, ...]]"
    """Parameter that forward gathers -> its values that may stay gathered."""
    sums: "Mapping[str, tuple[Reduction, ...]]"
    """Parameter -> reductions of its gradient that may run once, in their order."""
    shard_sums: "Mapping[str, tuple[Reduction, ...]]"
    """The same for the reductions of its shards."""
    other_gradient_bytes: int
    """Gradients of the other parameters."""
    unit_of: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> name of those that it is decided on alike with, in place of its block."""
    solved: dict[Choice, SolvedAccumulation] = field(default_factory=dict)
    _graphs: dict[tuple[str, "_Parts"], LoadedGraph] = field(default_factory=dict)
    _results: dict[tuple[int, Caps, bool], Result] = field(default_factory=dict)

    @classmethod
    def of(
        cls, step: Step, num_micro_batches: int, unit_of: Mapping[str, str] | None = None
    ) -> "Accumulation":
        """Return the accumulation of ``step``; ``InputError`` for fewer than two micro-batches."""
        if not isinstance(num_micro_batches, int) or num_micro_batches < 2:
            raise InputError(
                "accumulate: expected the number of micro-batches of a step, 1 or more, found"
                f" {num_micro_batches!r}"
            )
        from apsched.whole_step.accumulation.graphs import parameter_gradient_bytes

        sums, backward = gradients_of(step.graphs[1]), step.graphs[1].captured
        assert backward is not None
        reduced = sum(allocated_bytes(one.reduced_bytes) for ones in sums.values() for one in ones)
        accumulation = cls(
            step=step,
            num_micro_batches=num_micro_batches,
            held=held_in(step.graphs),
            sums=sums,
            shard_sums=gradients_of(step.graphs[1], of_shards=True),
            other_gradient_bytes=parameter_gradient_bytes(backward) - reduced,
            unit_of=unit_of or {},
        )
        return accumulation.above_floor_of(accumulation.always)

    def with_cap(self, memory_cap: MemoryCap | None) -> "Accumulation":
        """Return this step under another memory cap, with the graphs that are made already; a floor
        is that with only those parameters kept that a rule keeps.
        """
        step = replace(self.step, request=replace(self.step.request, memory_cap=memory_cap))
        if memory_cap is None or not memory_cap.above_floor:
            step = self.step.with_cap(memory_cap)
        return replace(self, step=step, solved={}).above_floor_of(self.always)

    def above_floor_of(self, choice: Choice) -> "Accumulation":
        """Return this step with its memory cap, if that is one above a floor, above the least
        memory that fits all graphs under ``choice``.
        """
        step = self.step.above_floor_of(self.pairs_of(choice))
        return self if step is self.step else replace(self, step=step, solved={})

    def with_more(self, size_bytes: int) -> "Accumulation":
        """Return this step with memory caps that are looser by ``size_bytes``."""
        return replace(self, step=self.step.with_more(size_bytes), solved={})

    @property
    def always(self) -> Choice:
        """Parameters that a rule of the plan keeps."""
        return self.step.always

    @property
    def entry_bytes(self) -> dict[str, int]:
        """Entry of a choice -> bytes passed from forward to backward."""
        return self.step.entry_bytes

    @property
    def held_bytes(self) -> dict[str, int]:
        """Parameter that forward gathers -> bytes that stay from backward to the next forward."""
        return {
            name: sum(allocated_bytes(value.size_bytes) for value in values)
            for name, values in self.held.items()
        }

    @property
    def sum_bytes(self) -> dict[str, int]:
        """Parameter -> bytes of its gradient before the reduction."""
        return _size_bytes(self.sums)

    @property
    def shard_sum_bytes(self) -> dict[str, int]:
        """Parameter -> bytes of the shards of its gradient."""
        return _size_bytes(self.shard_sums)

    @property
    def reduced_bytes(self) -> dict[str, int]:
        """Parameter -> bytes of its reduced gradient."""
        return {
            name: sum(allocated_bytes(one.reduced_bytes) for one in ones)
            for name, ones in self.sums.items()
        }

    @property
    def entries(self) -> tuple[str, ...]:
        """All entries that a choice may have."""
        return (
            *self.step.entry_bytes,
            *(marked(name, NEXT) for name in self.held),
            *(marked(name, SUM) for name in self.sums),
            *(marked(name, SUM_SHARDS) for name in self.shard_sums),
        )

    def search(self, choice: Choice) -> SolvedAccumulation:
        """Return the graphs solved under ``choice``, by the search alone if they were not solved
        yet; of a choice that does not fit only some, unless rules of the plan make it.
        """
        known = self.solved.get(choice)
        if known is not None:
            return known
        return self.solve(choice, search_alone=True, is_whole=choice == self.always)

    def solve(
        self, choice: Choice, *, search_alone: bool = False, is_whole: bool = True
    ) -> SolvedAccumulation:
        """Return all graphs solved under ``choice``; each choice once. Without ``is_whole`` the
        first graph that does not fit ends the work.
        """
        known = self.solved.get(choice)
        if (
            known is None
            or (is_whole and not known.is_whole)
            or not (known.is_final or search_alone)
        ):
            words = f"{'solve' if known is None else 'solve again'} with {_words(choice)}"
            with self.step.progress.stage(words):
                made = self._solve(choice, search_alone=search_alone, is_whole=is_whole)
                self.solved[choice] = made
        return self.solved[choice]

    @property
    def free_bytes(self) -> tuple[int | None, int | None]:
        """Bytes that are left for parameters and gradients of other micro-batches at the beginning
        of forward, and between forward and backward; ``None`` without a memory cap.
        """
        cap, problem = self.step.cap_bytes[0], self.step.least[0].problem
        given = sum(s.size_bytes for s in problem.storages if s.kept or s.birth < 0)
        free = None if cap is None else cap - given, self.step.free_before_backward
        first, second = (None if f is None else f - self.other_gradient_bytes for f in free)
        return first, second

    def graphs_of(self, choice: Choice) -> tuple[Graphs, ...]:
        """Return the graphs of the first, a middle and the last micro-batch under ``choice``; where
        all are equal, of one.
        """
        return tuple(pair.graphs for pair in self.pairs_of(choice))

    def pairs_of(self, choice: Choice) -> tuple[CountedPair, ...]:
        """Return the graphs of all micro-batches under ``choice``, equal ones once."""
        return tuple(pair for _, pair in sorted(self._pairs(choice), key=lambda one: one[0]))

    def outside_bytes(self, choice: Choice, pair: CountedPair) -> tuple[int, int]:
        """Return the memory of the step outside of each graph of ``pair``, which are graphs under
        ``choice``.
        """
        more = self.step.communicator_bytes(self.step.under(_Parts.of(choice).kept))
        forward, backward = pair.beside_bytes
        return more + forward, more + backward

    def _pairs(self, choice: Choice) -> "Iterator[tuple[int, CountedPair]]":
        """Yield the graphs of micro-batches and their place, equal ones once. Those in the middle,
        which hold the most, come first; each pair is made when it is needed.
        """
        parts = _Parts.of(choice)
        shards = self.step.beside_bytes(parts.kept)
        sums = sum(b for name, b in self.sum_bytes.items() if name in parts.summed)
        sums += sum(b for name, b in self.shard_sum_bytes.items() if name in parts.shards)
        once = parts.summed | parts.shards
        reduced = sum(b for name, b in self.reduced_bytes.items() if name not in once)
        reduced += self.other_gradient_bytes
        last = self.num_micro_batches - 1
        places = sorted({0, min(1, last), last}) if parts.is_shared else [0]
        middle = len(places) // 2
        for k in sorted(places, key=lambda k: (k != places[middle], -k)):
            before = k > 0 or len(places) == 1
            gradients = before * (reduced + sums), before * reduced  # backward takes the sums
            count = 1 + (k == places[middle]) * (self.num_micro_batches - len(places))
            pair = self._pair(parts, k) if parts.is_shared else self.step.under(parts.kept)
            yield (
                k,
                CountedPair(count=count, graphs=pair, gradient_bytes=gradients, shard_bytes=shards),
            )

    def _solve(self, choice: Choice, *, search_alone: bool, is_whole: bool) -> SolvedAccumulation:
        found: dict[int, CountedPair] = {}
        limits: list[Caps] = []
        left_out, too_large = False, False
        for k, some in self._pairs(choice):
            caps = list(map(lowered, self.step.caps, self.outside_bytes(choice, some)))
            graphs = zip(some.graphs, caps, strict=True)
            if not is_whole and any(exceeds_memory_cap(g.problem, cap) for g, cap in graphs):
                left_out, too_large = True, True
                break
            found[k] = some
            limits += caps
            request = self.step.request
            both = [
                self._result(graph, cap, request, search_alone=search_alone)
                for graph, cap in zip(some.graphs, caps, strict=True)
            ]
            if not is_whole and any(result.best is None for result in both):
                left_out = True
                break
        solved = self._solved_pairs(found, limits, search_alone=search_alone)
        return SolvedAccumulation(
            kept=choice,
            pairs=tuple(solved[k] for k in sorted(solved)),
            is_whole=not left_out,
            is_too_large=too_large,
        )

    def _solved_pairs(
        self, found: Mapping[int, CountedPair], caps: Sequence[Caps], *, search_alone: bool
    ) -> dict[int, SolvedPair]:
        """Return the pairs ``found`` with the answers for their graphs, which have ``caps``."""
        graphs = [graph for some in found.values() for graph in some.graphs]
        solve = partial(self._result, search_alone=search_alone)
        results = iter(solve_on_one_device(graphs, caps, self.step.request, solve))
        solved = {}
        for k, some in found.items():
            forward, backward = (
                with_gradients(next(results), held) for held in some.gradient_bytes
            )
            solved[k] = SolvedPair(
                count=some.count,
                graphs=some.graphs,
                gradient_bytes=some.gradient_bytes,
                shard_bytes=some.shard_bytes,
                results=(forward, backward),
            )
        return solved

    def _result(
        self, graph: LoadedGraph, caps: Caps, request: SolveRequest, *, search_alone: bool
    ) -> Result:
        key = id(graph), caps, request.second_group
        known = self._results.get(key)
        if known is None or not (known.answer.is_final or search_alone):
            step = replace(self.step, request=request)
            known = (
                step.solve_graph(graph, caps, search_alone=search_alone)
                if known is None or known.answer.may_improve
                else completed(known, request)
            )
            self._results[key] = known
        return known

    def _pair(self, parts: "_Parts", k: int) -> Graphs:
        """Return the graphs of micro-batch ``k``: ``forward`` and ``backward`` of the first,
        ``forward-2`` and ``backward-2`` of the next ones, ``backward-3`` of the last.
        """
        from apsched.whole_step.accumulation.graphs import (
            Place,
            micro_batch_backward,
            micro_batch_forward,
        )

        place = Place(first=k == 0, last=k == self.num_micro_batches - 1)
        forward, backward = self.step.under(parts.kept)
        first, second = forward.captured, backward.captured
        assert first is not None
        assert second is not None
        known = held_in((forward, backward))
        held = [value for name in sorted(parts.held) for value in known[name]]
        gradients, shards = gradients_of(backward), gradients_of(backward, of_shards=True)
        summed = [one for name in sorted(parts.summed) for one in gradients[name]]
        summed += [one for name in sorted(parts.shards) for one in shards[name]]
        names = ("forward", "forward-2")[k > 0], f"backward{self._suffix(k)}"
        nothing = frozenset[str]()
        in_last = replace(parts, held=nothing)
        keys = (
            (names[0], replace(parts, summed=nothing, shards=nothing)),
            (names[1], in_last if place.last else parts),
        )
        if place.first and all(value.backward for value in held):
            self._graphs[keys[0]] = forward  # it neither takes nor returns anything more
        if keys[0] not in self._graphs:
            made = micro_batch_forward(first, held, place, names[0])
            self._graphs[keys[0]] = self.step.posed(priced_as(forward, made))
        if keys[1] not in self._graphs:
            made = micro_batch_backward((first, second), held, summed, place, names[1])
            self._graphs[keys[1]] = self.step.posed(priced_as(backward, made))
        return self._graphs[keys[0]], self._graphs[keys[1]]

    def _suffix(self, k: int) -> str:
        last = k == self.num_micro_batches - 1
        number = 1 + (k > 0) + (last and self.num_micro_batches > 2)
        return f"-{number}" if number > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A choice by kind: entries about the seam of forward and backward, names of the others."""

    kept: Choice
    held: frozenset[str]
    summed: frozenset[str]
    shards: frozenset[str]

    @property
    def is_shared(self) -> bool:
        """Whether micro-batches share gathers or reductions, so that their graphs differ."""
        return bool(self.held or self.summed or self.shards)

    @classmethod
    def of(cls, choice: Choice) -> "_Parts":
        def names(mark: str) -> frozenset[str]:
            return frozenset(name_of(entry) for entry in choice if mark_of(entry) == mark)

        marks = (NEXT, SUM, SUM_SHARDS)
        kept = Choice(entry for entry in choice if mark_of(entry) not in marks)
        return cls(kept=kept, held=names(NEXT), summed=names(SUM), shards=names(SUM_SHARDS))


def _words(choice: Choice) -> str:
    """Return the numbers of entries of ``choice`` in words, those of each kind."""
    counts = Counter(map(mark_of, choice))
    kinds = (
        (IN_NODE, "in their node"),
        (NEXT, "that stay gathered"),
        (SUM, "reduced once"),
        (SUM_SHARDS, "whose shards are reduced once"),
    )
    more = (f"{counts[mark]} {words}" for mark, words in kinds if counts[mark])
    return ", ".join((f"{counts['']} parameters kept", *more))


def with_gradients(result: Result, size_bytes: int) -> Result:
    """Return ``result`` with the gradients of the micro-batches before in its account."""
    account = result.account
    if account is None:
        return result
    beside = replace(account.beside, gradient_bytes=size_bytes)
    return replace(result, account=replace(account, beside=beside))


def held_in(graphs: Graphs) -> "dict[str, tuple[HeldValue, ...]]":
    """Return parameter -> values that may stay gathered."""
    from apsched.whole_step.accumulation.graphs import held_parameters

    forward, backward = (graph.captured for graph in graphs)
    assert forward is not None
    assert backward is not None
    return held_parameters(forward, backward)


def _size_bytes(sums: "Mapping[str, tuple[Reduction, ...]]") -> dict[str, int]:
    return {n: sum(allocated_bytes(one.size_bytes) for one in ones) for n, ones in sums.items()}


def gradients_of(
    backward: LoadedGraph, *, of_shards: bool = False
) -> "dict[str, tuple[Reduction, ...]]":
    """Return parameter -> reductions of its gradient, or ``of_shards`` of its shards, that no
    compute waits for.
    """
    from apsched.whole_step.accumulation.graphs import summed_gradients

    assert backward.captured is not None
    problem = backward.problem
    starts = {
        problem.node_names[c.start]: c.module
        for c in problem.collectives
        if c.module and not c.on_path and problem.keys[c.key].kind != CollectiveKind.ALL_GATHER
    }
    return summed_gradients(backward.captured, starts, of_shards=of_shards)
