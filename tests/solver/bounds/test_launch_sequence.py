"""The bound over all sequences of launches: least of all sequences, and no schedule is below it."""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_copies
from apsched.solver.bounds.best import fixed_order_bound
from apsched.solver.bounds.launch_sequence import (
    Stream,
    launch_sequence_bound,
    least_step,
    streams_of_one_kind,
)
from apsched.solver.bounds.paths.bound import path_bound
from apsched.solver.bounds.paths.path_work import PathWork
from apsched.solver.bounds.tighten import tighten
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import random_caps, random_problem

_KIB = 1024


def falling(rng: random.Random, num: int) -> np.ndarray:
    return np.sort([float(rng.randint(0, 40)) for _ in range(num)])[::-1]


def random_stream(rng: random.Random) -> Stream:
    num = rng.randint(1, 6)
    after = falling(rng, num)
    behind = falling(rng, num)
    counted = np.sort(rng.choices(after, k=rng.choice((0, 0, 1, 2))))
    sizes = sorted(rng.sample(range(1, num + 1), min(num, rng.randint(1, 2))))
    return Stream(
        after=after + behind,
        behind=behind,
        way=after + rng.choice((0, 10)),
        flat=np.cumsum([rng.choice((5.0, 20.0)), *rng.choices((1.0, 4.0, 9.0), k=num)]),
        copy=rng.choice((0.0, 1.0, 3.0)),
        alone_cells=np.array(sizes),
        alone=np.array([float(rng.randint(3, 30)) for _ in sizes]),
        counted_after=counted,
        counted_way=counted + rng.choice((0, 10)),
        lead=float(rng.randint(0, 9)),
        compute=float(after[0] + behind[0] + rng.randint(0, 9)),
        work=float(rng.randint(0, 9)),
    )


def is_counted(stream: Stream, launch: tuple[bool, int, float]) -> bool:
    """Whether ``launch`` is one of the largest alone, which are counted."""
    return bool(len(stream.counted_after)) and not launch[0] and launch[1] == stream.alone_cells[-1]


def sequences(stream: Stream, left: int, counted: int) -> Iterator[list[tuple[bool, int, float]]]:
    """Yield all sequences of launches: in a bucket or not, cells, transfer."""
    if left == 0:
        yield []
        return
    launches = [(True, cells, float(stream.flat[cells])) for cells in range(1, left + 1)]
    for cells, ticks in zip(stream.alone_cells.tolist(), stream.alone.tolist(), strict=True):
        launches.append((False, cells, ticks))
    for launch in launches:
        largest = is_counted(stream, launch)
        if launch[1] <= left and (not largest or counted > 0):
            for rest in sequences(stream, left - launch[1], counted - largest):
                yield [launch, *rest]


def step_of(stream: Stream, launches: list[tuple[bool, int, float]]) -> float:
    """The longest path through a sequence, from its definition."""
    copies = [stream.copy * cells if flat else 0.0 for flat, cells, _ in launches]
    longest, ended, begin = stream.compute + stream.work + sum(copies), stream.lead, 0
    for j, (_, cells, ticks) in enumerate(launches):
        ended += ticks
        after, way = stream.after[begin], stream.way[begin]
        if is_counted(stream, launches[j]):  # of those from here on one has this need or a sooner
            last = sum(is_counted(stream, launch) for launch in launches[j:]) - 1
            after = max(after, stream.counted_after[last] + stream.behind[begin])
            way = max(way, stream.counted_way[last])
        longest = max(longest, ended + max(after + sum(copies[j:]), way))
        begin += cells
    return longest


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_least_of_all_sequences(seed: int) -> None:
    """And infinite above a limit, at the least only within it."""
    stream = random_stream(random.Random(seed))
    found = sequences(stream, len(stream.after), len(stream.counted_after))
    least = min(step_of(stream, launches) for launches in found)
    assert least_step(stream, np.inf) == pytest.approx(least)
    assert least_step(stream, least + 1e-6) == pytest.approx(least)
    assert least_step(stream, least * 0.99 - 1e-6) == np.inf


def test_labels_that_are_merged_only_lower_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(200):
        stream = random_stream(random.Random(seed))
        exact = least_step(stream, np.inf)
        with monkeypatch.context() as few:
            few.setattr("apsched.solver.bounds.launch_sequence._MOST_LABELS", 2)
            assert least_step(stream, np.inf) <= exact + 1e-9, seed


def gathers_first(rng: random.Random) -> Problem:
    """A forward graph that waits for its first gathers, perhaps with a reduction on its path."""
    b = ByHand(
        prices={
            "all_gather": line(rng.choice((20, 60, 200)), rng.choice((2, 10, 50))),
            "all_reduce": line(rng.choice((0, 50)), 1),
        },
        copy_price=line(rng.choice((0, 10)), rng.choice((0, 1, 5))),
        bucket_launch_ticks=rng.choice((0, 5)),
    )
    starts = []
    for i in range(3):
        size = rng.choice((1, 1, 2, 3)) * _KIB
        shard = b.input(f"s{i}", size, kept=True)
        starts.append(b.start("all_gather", f"ag{i}", shard, size, 8 * size, launch_ticks=3))
    x = b.input("x", _KIB)
    for i, start in enumerate(starts):
        x = b.compute(f"f{i}", rng.choice((5, 100, 400)), x, b.wait(f"w{i}", start), size=_KIB)
        if i == 1 and rng.random() < 0.4:
            x = b.wait("sum", b.start("all_reduce", "ar", x, _KIB, _KIB))
    return b.output(x)


def reductions_last(rng: random.Random) -> Problem:
    """A backward graph that ends with its reductions, perhaps with another on its path."""
    b = ByHand(
        prices={
            "all_reduce": line(rng.choice((20, 60, 200)), rng.choice((2, 10, 50))),
            "all_gather": line(rng.choice((0, 50)), 1),
        },
        copy_price=line(rng.choice((0, 10)), rng.choice((0, 1, 5))),
        bucket_launch_ticks=rng.choice((0, 5)),
    )
    x, waits = b.input("x", _KIB), []
    for i in range(3):
        size = rng.choice((1, 1, 2, 3)) * 8 * _KIB
        x = b.compute(f"b{i}", rng.choice((5, 100, 400)), x, size=size)
        start = b.start("all_reduce", f"ar{i}", x, size, size, launch_ticks=rng.choice((3, 50)))
        waits.append(b.wait(f"w{i}", start))
        if i == 1 and rng.random() < 0.4:
            start = b.start("all_gather", "ag", x, _KIB, _KIB, group="tp")
            x = b.wait("gathered", start)
    return b.output(x, *waits)


def least_of(instance: Instance) -> float:
    streams = streams_of_one_kind(instance, PathWork.in_order(instance.arrays))
    return max((least_step(stream, np.inf) for stream in streams), default=0.0)


@pytest.mark.parametrize("made", [gathers_first, reductions_last])
def test_no_schedule_is_below_it(made: Callable[[random.Random], Problem]) -> None:
    """It is often above the paths, and sometimes nearly met."""
    raised = met = 0
    for seed in range(150):
        problem = made(random.Random(seed))
        optimum = best_schedule(problem, Caps())
        assert optimum is not None
        forced = tighten(without_copies(Instance.of(problem)))
        least = least_of(forced)
        assert least <= optimum.step_time_ticks + 1e-6, seed
        raised += least > path_bound(forced).ticks * 1.001
        met += least >= optimum.step_time_ticks * 0.98
    assert raised > 10
    assert met > 10


def test_no_schedule_of_random_problems_is_below_it() -> None:
    tried = 0
    for seed in range(400):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=3)
        caps = random_caps(rng, problem)
        optimum = best_schedule(problem, caps)
        instance = Instance.of(problem, caps)
        if optimum is None or not problem.collectives:
            continue
        forced = tighten(without_copies(instance))
        forced = replace(forced, arrays=replace(forced.arrays, need_slot=instance.arrays.need_slot))
        least = least_of(forced)
        assert least <= optimum.step_time_ticks + 1e-6, seed
        tried += least > 0
    assert tried > 100


def test_the_best_bound_names_it() -> None:
    """A step that waits for a long time; the bounds that search stops at stay those of before."""
    for seed in range(150):
        instance = Instance.of(gathers_first(random.Random(seed)))
        best = fixed_order_bound(instance)
        if best.source == "all sequences of launches":
            assert best.monotone_ticks is not None
            assert best.monotone_ticks < best.ticks
            return
    raise AssertionError("no bound is that of all sequences")


def test_a_step_of_compute_is_left_out() -> None:
    instance = Instance.of(gathers_first(random.Random(0)))
    compute = int(instance.arrays.compute_ticks.sum())
    assert launch_sequence_bound(instance, compute) is None


def test_collectives_of_no_bytes_have_no_sequence() -> None:
    """Nor a warning of numpy: the size of a cell was 0, and sizes were divided by it."""
    b = ByHand(prices={"all_gather": line(10)})
    x = b.input("x", 512)
    for i in range(3):
        shard = b.input(f"s{i}", 0, kept=True)
        gathered = b.wait(f"w{i}", b.start("all_gather", f"g{i}", shard, 0, 0))
        x = b.compute(f"k{i}", 10, x, gathered, size=512)
    instance = Instance.of(b.output(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch_sequence_bound(instance, 10_000) is None
