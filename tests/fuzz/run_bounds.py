"""Judge the claims of answers to random problems by all schedules that ``verify`` accepts, until
the time is up or so many are judged; print how many are false, and the smallest problem found for
each. Each process prints its counts after every 1,000 problems, and a false claim at once.

usage: python tests/fuzz/run_bounds.py [--minutes 60] [--problems 100000] [--first-seed 0]
    [--processes 2]
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.result import Status
from apsched.schedule.simulate import simulate
from tests.helpers.claims import BrokenClaim, answer, broken_claims, judged, random_case
from tests.helpers.verify_oracle import TooLargeError

_SHOWN_EVERY = 1_000


def try_seeds(
    first_seed: int, every: int, seconds: float, problems: int
) -> tuple[Counter[str], list[str], float]:
    """Return what was judged, counted, the false claims as text, and the seconds of processor time:
    of ``first_seed`` and each ``every``-th seed behind it.
    """
    end, seed, failures = time.monotonic() + seconds, first_seed, []
    counts: Counter[str] = Counter()
    while time.monotonic() < end and counts["judged"] < problems:
        try:
            result, broken = judged(seed)
            counts["judged"] += 1
            counts["proven optimal"] += result.status is Status.OPTIMAL
            counts["proven infeasible"] += bool(
                result.infeasibility is not None and result.infeasibility.proven
            )
        except TooLargeError:
            broken = []
            counts["too large"] += 1
        counts["tried"] += 1
        for claim in {b.claim: b for b in broken}.values():
            counts[f"false {claim.claim}"] += 1
            failures.append(_shortened(seed, claim))
            print(f"{failures[-1]}\n", flush=True)
        if counts["tried"] % _SHOWN_EVERY == 0:
            print(f"up to seed {seed}: {_as_text(counts, failures)}", flush=True)
        seed += every
    return counts, failures, time.process_time()


def _as_text(counts: Counter[str], failures: list[str]) -> str:
    shown = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    return f"{shown}; {len(failures)} claims are false"


def _shortened(seed: int, broken: BrokenClaim) -> str:
    """Return the false claim about the case of ``seed``, made as small as the same claim stays
    false.
    """
    problem, caps = random_case(seed)
    as_asked = seed % 2 == 1
    smaller = True
    while smaller:
        smaller = False
        for other, limits in _smaller(problem, caps):
            if (again := _still(other, limits, broken.claim, as_asked=as_asked)) is not None:
                problem, caps, broken, smaller = other, limits, again, True
                break
    timeline = simulate(problem, broken.schedule)
    lines = [
        f"seed {seed}: {broken.claim} {broken.told}, but a schedule takes"
        f" {timeline.step_time_ticks} ticks, {timeline.peak_memory_bytes} bytes and"
        f" {timeline.num_launches} launches; {caps}",
        *(
            f"  {name} {kind} {ticks} after {before}"
            for name, kind, ticks, before in zip(
                problem.node_names,
                problem.kinds,
                problem.duration_ticks,
                problem.predecessors,
                strict=True,
            )
        ),
        *(f"  {collective}" for collective in problem.collectives),
        f"  {broken.schedule}",
    ]
    return "\n".join(lines)


def _smaller(problem: Problem, caps: Caps) -> list[tuple[Problem, Caps]]:
    """Return what is simpler by one thing: a cap, a kernel, a bucket, or the time of a node."""
    found = [
        (problem, replace(caps, **{field.name: None}))
        for field in fields(caps)
        if field.name != "max_compute_move" and getattr(caps, field.name) is not None
    ]
    if problem.kernels:
        found.append((replace(problem, kernels=(), cuts=()), caps))
    collectives = problem.collectives
    found += [
        (
            replace(
                problem,
                collectives=(
                    *collectives[:c],
                    replace(one, bucketable=False),
                    *collectives[c + 1 :],
                ),
            ),
            caps,
        )
        for c, one in enumerate(collectives)
        if one.bucketable and one.restriction.group is None
    ]
    ticks = problem.duration_ticks
    found += [
        (replace(problem, duration_ticks=(*ticks[:k], 0, *ticks[k + 1 :])), caps)
        for k, d in enumerate(ticks)
        if d
    ]
    return found


def _still(problem: Problem, caps: Caps, claim: str, *, as_asked: bool) -> BrokenClaim | None:
    try:
        result = answer(problem, caps, as_asked=as_asked)
        return next((b for b in broken_claims(problem, caps, result) if b.claim == claim), None)
    except TooLargeError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Judge claims of answers by all schedules that verify accepts."
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--problems", type=int, default=sys.maxsize, help="at most")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    first, every = given.first_seed, max(given.processes, 1)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    cpu_s = 0.0
    with ProcessPoolExecutor(every) as pool:
        share = -(-given.problems // every)
        started = [
            pool.submit(try_seeds, first + i, every, 60 * given.minutes, share)
            for i in range(every)
        ]
        for found in started:
            some, false, used_s = found.result()
            counts, failures, cpu_s = counts + some, failures + false, cpu_s + used_s
    print(f"in all: {_as_text(counts, failures)}")
    print(f"{counts['tried'] / cpu_s:.1f} in a second of processor time")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
