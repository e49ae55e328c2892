"""Whether tests notice a fault: a process for each, forked from one that has collected all tests.

The child puts the faulty code into the function and runs the tests that run the lines of the fault,
the quickest first, until one fails. numba is off (``NUMBA_DISABLE_JIT``), so that no machine code
of the right function is left anywhere.
"""

import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.mutants import Mutant, code_of

_MOST_EVENTS = 200_000
"""Lines that are noted of one test; behind them only the functions that it calls."""
_WALL_SECONDS = 900.0
_PASSED, _FAILED, _BROKEN = 0, 1, 2
_HEAVY = frozenset({"layered_presets", "debug_graphs", "debug_run"})
"""Fixtures that take longer than most tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The result of a test without a fault."""

    cpu_s: float
    lines: dict[str, frozenset[int]]
    """File -> lines that it runs, and first lines of functions that it calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of the tests on a fault."""

    outcome: str
    """killed, timeout, survived, or uncovered: no test runs the function."""
    by: str = ""
    """The test that fails."""
    num_tests: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Judge:
    """A plugin of pytest that takes over once all tests are collected."""

    root: Path
    files: Sequence[str]
    """Files with faults."""
    most_cases: int
    """Most cases of one parametrized test."""
    slowest_s: float
    """A test that takes longer is left out."""
    budget_s: float
    """Of processor time, for the tests of one fault."""
    notes: Path
    """Results of tests, kept for the next run."""
    left_out: frozenset[str] = frozenset()
    """Names of tests."""
    work: Callable[["Judge"], None]
    functions: dict[tuple[str, str, int], list[FunctionType]] = field(default_factory=dict)
    items: list[pytest.Item] = field(default_factory=list)
    known: dict[int, Known] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        groups: dict[tuple[str, str], list[pytest.Item]] = {}
        for item in items:
            heavy = _HEAVY.intersection(getattr(item, "fixturenames", ()))
            if not heavy and item.get_closest_marker("alone") is None:
                key = str(item.path), getattr(item, "originalname", item.name)
                groups.setdefault(key, []).append(item)
        spread = [item for group in groups.values() for item in _spread(group, self.most_cases)]
        items[:] = [item for item in spread if item.nodeid not in self.left_out]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        for found in gc.get_objects():
            if type(found) is FunctionType:
                self.functions.setdefault(_key(found), []).append(found)
        gc.collect()
        gc.freeze()  # children share what they do not write
        self._get_to_know()
        self.work(self)
        return True

    def _get_to_know(self) -> None:
        """Run every test as it is, those of a file in one process, unless the notes of an earlier
        run have it.
        """
        noted = json.loads(self.notes.read_text()) if self.notes.exists() else {}
        by_file: dict[Path, list[int]] = {}
        for k, item in enumerate(self.items):
            if item.nodeid not in noted:
                by_file.setdefault(item.path, []).append(k)
        for path, numbers in by_file.items():
            for k in numbers:
                noted[self.items[k].nodeid] = None
            left = numbers
            while left:
                said, _, _ = self._in_child(lambda say, n=left: self._watch(n, say))
                for what in said:
                    if len(what) > 1:
                        noted[self.items[what[0]].nodeid] = what[1:]
                left = left[1 + max((left.index(k) for k, *_ in said), default=len(left)) :]
            self.notes.write_text(json.dumps(noted))
            mine = [known for k in numbers if (known := noted[self.items[k].nodeid])]
            seconds = sum(known[0] for known in mine)
            name = path.relative_to(self.root)
            print(f"{name}: {len(mine)} of {len(numbers)} tests, {seconds:.1f} s", flush=True)
        for k, item in enumerate(self.items):
            if known := noted[item.nodeid]:
                lines = {file: frozenset(seen) for file, seen in known[1].items()}
                self.known[k] = Known(cpu_s=known[0], lines=lines)

    def _watch(self, numbers: Sequence[int], say: Callable[[Any], None]) -> None:
        wanted = {os.path.realpath(self.root / file): file for file in self.files}
        for k in numbers:
            say([k])
            seen: dict[str, set[int]] = {}
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, 1.2 * self.slowest_s)
            sys.settrace(_tracer(wanted, seen))
            passed = self._passes(k, None)
            sys.settrace(None)
            cpu_s = time.process_time() - began
            if passed and cpu_s <= self.slowest_s:
                say([k, cpu_s, {file: sorted(lines) for file, lines in seen.items()}])

    def judged(self, mutant: Mutant | None, chosen: Sequence[int]) -> Verdict:
        """Return what ``chosen`` tests say of a fault; ``None``: of none."""
        if not chosen:
            return Verdict(outcome="uncovered")
        began = time.monotonic()
        said, status, cpu_s = self._in_child(lambda say: self._try(mutant, chosen, say))
        name = self.items[chosen[len(said) - 1]].nodeid if said else ""
        if time.monotonic() - began > _WALL_SECONDS or os.WIFSIGNALED(status):
            return Verdict(outcome="timeout", by=name, num_tests=len(said), cpu_s=cpu_s)
        if os.WEXITSTATUS(status) == _BROKEN:
            raise ChildProcessError(f"expected a verdict on {mutant}, found status {status}")
        failed = os.WEXITSTATUS(status) == _FAILED
        return Verdict(
            outcome="killed" if failed else "survived",
            by=name if failed else "",
            num_tests=len(said),
            cpu_s=cpu_s,
        )

    def chosen(self, mutant: Mutant) -> list[int]:
        """Return the tests that run the lines of the fault, the quickest first, then those that
        call its function, within the budget.
        """
        first, last = mutant.lines
        exact, near = [], []
        for k, known in self.known.items():
            lines = known.lines.get(mutant.file, frozenset())
            if not lines.isdisjoint(range(first, last + 1)):
                exact.append(k)
            elif not lines.isdisjoint(range(mutant.first_line, mutant.last_line + 1)):
                near.append(k)
        found, left = [], self.budget_s
        for k in (
            *sorted(exact, key=lambda k: self.known[k].cpu_s),
            *sorted(near, key=lambda k: self.known[k].cpu_s),
        ):
            if left <= 0:
                break
            left -= self.known[k].cpu_s
            found.append(k)
        return found

    def _try(
        self, mutant: Mutant | None, chosen: Sequence[int], say: Callable[[Any], None]
    ) -> None:
        if mutant is not None:
            self.put(mutant)
        for k, after in zip(chosen, [*chosen[1:], None], strict=True):
            say(k)
            signal.setitimer(signal.ITIMER_PROF, 3 * self.known[k].cpu_s + 1)
            if not self._passes(k, after):
                os._exit(_FAILED)

    def put(self, mutant: Mutant) -> None:
        """Put the faulty code into the function of ``mutant`` in this process, wherever it is
        kept.
        """
        path = os.path.realpath(self.root / mutant.file)
        functions = self.functions.get((path, mutant.function, mutant.first_line), [])
        if not functions:
            raise LookupError(f"expected the function of {mutant.name} in memory, found none")
        for function in functions:
            function.__code__ = code_of(self.root, mutant, function.__code__.co_filename)

    def _passes(self, k: int, after: int | None) -> bool:
        item = self.items[k]
        nextitem = None if after is None else self.items[after]
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        return not any(report.failed for report in reports)

    def _in_child(
        self, work: Callable[[Callable[[Any], None]], None]
    ) -> tuple[list[Any], int, float]:
        """Return what ``work`` says in a process of its own, its status and processor time."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _quiet()
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

            def say(what: Any) -> None:
                os.write(writing, json.dumps(what).encode() + b"\n")

            try:
                work(say)
                os._exit(_PASSED)
            finally:
                os._exit(_BROKEN)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = [json.loads(line) for line in _lines(pipe, child)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _, status = os.waitpid(child, 0)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        return said, status, cpu_s


def _key(function: FunctionType) -> tuple[str, str, int]:
    code = function.__code__
    return _real(code.co_filename), code.co_qualname, code.co_firstlineno


@cache
def _real(path: str) -> str:
    return os.path.realpath(path)


def _spread(group: list[pytest.Item], most: int) -> list[pytest.Item]:
    if len(group) <= most:
        return group
    return [group[k * len(group) // most] for k in range(most)]


def _lines(pipe: Any, child: int) -> Iterator[bytes]:
    """Yield what the child writes; end it where it goes on for too long by the clock."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
    try:
        yield from pipe
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _quiet() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _tracer(wanted: dict[str, str], seen: dict[str, set[int]]) -> Callable[..., Any]:
    """Return a trace function that notes lines of ``wanted`` files in ``seen``."""
    names: dict[str, str | None] = {}
    left = _MOST_EVENTS

    def called(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename not in names:
            names[code.co_filename] = wanted.get(os.path.realpath(code.co_filename))
        file = names[code.co_filename]
        if file is None:
            return None
        lines = seen.setdefault(file, set())
        lines.add(code.co_firstlineno)
        if left <= 0:
            return None

        def line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            left -= 1
            lines.add(frame.f_lineno)
            return line if left > 0 else None

        return line

    return called
