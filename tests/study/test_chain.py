"""Along memory caps: few solves, every cap answered, monotone, and the same whatever order answers
come in.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from apsched.quantities import MemoryCap
from apsched.study.axes import MemoryRange
from apsched.study.chain import MOST_SOLVES, Chain, Job
from apsched.study.worker import ALONG, SOLVED, Outcome, better_of

FLOOR, TOP = 100, 2000
WHOLE = MemoryRange(first=MemoryCap(size_bytes=0, above_floor=True), last=MemoryCap(), count=20)


def outcome(job: Job, step: int, bound: int, peak: int) -> Outcome:
    assert job.memory_cap is not None
    cap = job.memory_cap.size_bytes
    return Outcome(
        status="feasible",
        how=SOLVED,
        memory_cap_bytes=FLOOR + (cap or 0) if job.memory_cap.above_floor else cap,
        step_ticks=step,
        bound_ticks=bound,
        bound_source="test",
        peak_memory_bytes=peak,
        num_launches=1,
        floor_memory_bytes=FLOOR,
        floor_bound_bytes=FLOOR,
        report={},
        solved_floor_bytes=FLOOR,
        solved_peak_bytes=peak,
        schedule=b"",
        seconds=1.0,
    )


def answered(
    chain: Chain,
    step_of: Callable[[int], int],
    rng: random.Random | None = None,
    *,
    left: dict[str, Outcome] | None = None,
    most: int = 1000,
    peak_of: Callable[[int], int] = lambda used: used,
) -> tuple[dict[str, Outcome], list[Job]]:
    """Answer a chain from ``left`` on with at most so many jobs: a solve is a little off by chance
    of its cap, other answers take the best of what they start from.
    """
    known = dict(left or {})
    jobs: list[Job] = []
    while len(jobs) < most and (ready := chain.next_jobs(known)):
        job = rng.choice(ready) if rng else ready[0]
        jobs.append(job)
        if job.starts:
            assert job.known is not None
            cap = job.memory_cap.size_bytes if job.memory_cap else None
            fit = [
                known[n]
                for n in job.starts
                if cap is None or (known[n].peak_memory_bytes or 0) <= cap
            ]
            assert fit, "one of the starts keeps the cap"
            best = min(fit, key=lambda o: o.value[:4])
            bound = min(job.known.bound_ticks, best.step_ticks or 0)
            found = replace(best, memory_cap_bytes=cap, how=ALONG, bound_ticks=bound)
            known[job.name] = better_of(known[job.name], found) if job.name in known else found
            continue
        assert job.memory_cap is not None
        cap = job.memory_cap.size_bytes
        used = TOP if cap is None else FLOOR + cap if job.memory_cap.above_floor else cap
        found = outcome(job, step_of(used), 900, min(peak_of(used), TOP))
        known[job.name] = better_of(known[job.name], found) if job.name in known else found
    return known, jobs


@given(st.integers(0, 2**32))
def test_a_frontier_is_monotone_whatever_the_solves_say(seed: int) -> None:
    """A looser cap never has a slower schedule or a higher bound; neighbours that differ by more
    than the slack are solved, each once.
    """
    steps = random.Random(seed)
    times: dict[int, int] = {}

    def step_of(cap: int) -> int:
        return times.setdefault(cap, 1000 + steps.randrange(500))

    chain = Chain(stated=(WHOLE,), full=False, slack=0.001)
    known, jobs = answered(chain, step_of)
    names = chain.names(known)
    assert len(names) == 20
    assert set(names) == set(known)
    solves = [job.name for job in jobs if not job.starts]
    assert len(solves) == len(set(solves))
    assert len(jobs) == len(set(jobs)), "a run does no job twice"
    values = [known[name] for name in names]
    for tighter, looser in pairwise(values):
        slower, faster = tighter.step_ticks or 0, looser.step_ticks or 0
        assert slower >= faster
        assert tighter.bound_ticks >= looser.bound_ticks
        if slower - faster > 0.001 * faster:
            assert ALONG not in (tighter.how, looser.how)
    assert chain.open_solves(known) == 0
    again, _ = answered(chain, step_of, random.Random(seed + 1))
    assert again == known


def test_what_a_stopped_run_left_is_gone_on_with() -> None:
    """From any prefix of the answers the rest comes out the same."""
    chain = Chain(stated=(WHOLE,), full=False, slack=0.001)
    whole, jobs = answered(chain, lambda cap: 3000 - cap)
    for done in range(len(jobs)):
        left, first = answered(chain, lambda cap: 3000 - cap, most=done)
        known, rest = answered(chain, lambda cap: 3000 - cap, left=left)
        assert known == whole
        assert [*first, *rest] == jobs


def test_full_solves_everything() -> None:
    chain = Chain(stated=(WHOLE,), full=True, slack=0.001)
    _, jobs = answered(chain, lambda cap: 3000 - cap)
    assert len(jobs) == 20
    assert not any(job.starts for job in jobs)


@given(st.integers(0, 2**32))
def test_full_is_monotone_too(seed: int) -> None:
    """Every cap is solved; what a solve under a looser cap does worse is taken over."""
    steps = random.Random(seed)
    times = {}
    chain = Chain(stated=(WHOLE,), full=True, slack=0.001)
    known, _ = answered(chain, lambda cap: times.setdefault(cap, 1000 + steps.randrange(500)))
    values = [known[name] for name in chain.names(known)]
    assert [outcome.how for outcome in values].count(ALONG) == 0
    for tighter, looser in pairwise(values):
        assert (tighter.step_ticks or 0) >= (looser.step_ticks or 0)
    again, _ = answered(chain, lambda cap: times[cap], random.Random(seed + 1))
    assert again == known


@given(st.integers(0, 2**32), st.booleans())
def test_a_schedule_that_fits_a_tighter_cap_is_taken_back(seed: int, full: bool) -> None:
    """In the end no cap has a slower schedule than another one that fits it."""
    steps, times, peaks = random.Random(seed), {}, {}
    chain = Chain(stated=(WHOLE,), full=full, slack=0.001)

    def step_of(cap: int) -> int:
        return times.setdefault(cap, 1000 + steps.randrange(500))

    def peak_of(cap: int) -> int:
        return peaks.setdefault(cap, steps.randint(FLOOR, cap))

    known, jobs = answered(chain, step_of, peak_of=peak_of)
    assert len(jobs) == len(set(jobs)), "a run does no job twice"
    values = [known[name] for name in chain.names(known)]
    for k, tighter in enumerate(values):
        for looser in values[k + 1 :]:
            fits = (looser.peak_memory_bytes or 0) <= (tighter.memory_cap_bytes or TOP)
            assert not fits or tighter.step_ticks <= looser.step_ticks
    again, _ = answered(chain, step_of, random.Random(seed + 1), peak_of=peak_of)
    assert again == known


def test_where_step_time_is_no_order_nothing_is_taken_over() -> None:
    """With scenarios or second groups a slower schedule may be the better one."""
    chain = Chain(stated=(WHOLE,), full=True, alone=True, slack=0.001)
    known, jobs = answered(chain, lambda cap: 1000 + cap)
    assert not any(job.starts for job in jobs)
    values = [known[name].step_ticks or 0 for name in chain.names(known)]
    assert values == sorted(values)


def test_few_solves_where_step_times_change_little() -> None:
    """One step between two caps: found by halves, and solved on both sides."""
    chain = Chain(stated=(WHOLE,), full=False, slack=0.001)
    known, jobs = answered(chain, lambda cap: 1500 if cap < 700 else 1000)
    assert sum(not job.starts for job in jobs) <= MOST_SOLVES + 4  # halves of eight caps
    steps = [known[name] for name in chain.names(known)]
    (edge,) = (k for k, (a, b) in enumerate(pairwise(steps)) if a.step_ticks != b.step_ticks)
    assert steps[edge].how != ALONG
    assert steps[edge + 1].how != ALONG
    assert any(outcome.how == ALONG for outcome in steps)


def test_nothing_is_solved_between_equals() -> None:
    """Where the floor is as fast as no cap at all, two solves say all."""
    chain = Chain(stated=(WHOLE,), full=False, slack=0.001)
    _, jobs = answered(chain, lambda cap: 1000)
    assert sum(not job.starts for job in jobs) == 2


def test_caps_below_the_floor_are_solved_for_their_explanation() -> None:
    stated = (MemoryCap(size_bytes=50), MemoryCap(size_bytes=500), MemoryCap(size_bytes=1000))
    known, jobs = answered(Chain(stated=stated, full=False, slack=0.001), lambda cap: 3000 - cap)
    assert set(known) == {"50", "500", "1000"}
    assert {job.name for job in jobs if not job.starts} == {"50", "500", "1000"}
    low = Chain(stated=(MemoryCap(size_bytes=50),), full=False, slack=0.001)
    assert len(answered(low, lambda cap: 1000)[1]) == 1
    assert Chain(stated=(None,), full=False, slack=0.0).first_name == "device"
