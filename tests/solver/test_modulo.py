"""One layer as a modulo schedule: what it promises for all depths is what the layers of a graph do, to the tick."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem import Problem
from apsched.solver.compact import compact
from apsched.solver.evaluate import SPINE, anatomy, evaluate
from apsched.solver.expand import expand
from apsched.solver.least_period import least_period, period_curve
from apsched.solver.loop_body import GATHER, REDUCTION, loop_body
from apsched.solver.modulo import LayerModel, ModuloBucket, ModuloSchedule
from apsched.solver.partition import Pricer
from apsched.solver.periods import find_period
from apsched.solver.unroll import unroll
from apsched.verify import verify
from tests.layered import Layer, layered

PLAIN = Layer()
FLAT = Layer(saved_bytes=0)
CASES = {
    "forward": layered(14),
    "backward": layered(14, backward=True),
    "slow network": layered(14, backward=True, ticks=(100, 3)),
    "slow network, dear copies": layered([Layer(ticks=(40, 60, 20), shard_bytes=(2048, 512, 4096))] * 14, ticks=(90, 1), copy_ticks=(3, 1)),
    "dear launches": layered(14, backward=True, launch_ticks=9),
    "tensor parallel": layered([replace(PLAIN, on_path=True)] * 14, backward=True, ticks=(30, 1)),
    "hsdp": layered([replace(PLAIN, chained=True)] * 14, backward=True, ticks=(30, 1)),
}


def model_of(problem: Problem, caps: Caps | None = None, reach: int = 2, most_gaps: int = 32) -> LayerModel:
    small = compact(problem)
    period = find_period(small)
    assert period is not None
    return LayerModel(loop_body(problem, small, period, caps or Caps(), reach=reach, most_gaps=most_gaps))


def run(problem: Problem, schedule: ModuloSchedule) -> tuple[list[int], int]:
    """Return how long each layer takes where all layers run as ``schedule`` says, and the peak; the schedule must be legal."""
    small = compact(problem)
    program = unroll(schedule, Pricer(problem, small))
    assert verify(problem, expand(problem, small, program), replace(schedule.body.caps, memory_cap_bytes=None)) == ()
    begin = anatomy(small, program).begin_ticks[program.operation == SPINE]
    period = schedule.body.period
    starts = begin[period.first_spine : period.past_spine : period.length]
    return np.diff(starts).tolist(), evaluate(small, program).peak_memory_bytes


@pytest.mark.parametrize("label", CASES)
def test_layers_in_the_middle_take_exactly_the_period(label: str) -> None:
    """Simulated layer by layer, and within the memory that the model counts."""
    problem = CASES[label]
    found = least_period(model_of(problem), 10.0)
    assert found.schedule is not None
    assert found.schedule.period_ticks == found.bound_ticks
    assert found.schedule.peak_memory_bytes == found.bound_bytes
    layers, peak = run(problem, found.schedule)
    middle = layers[len(layers) // 3 : -len(layers) // 3]
    assert middle == [found.schedule.period_ticks] * len(middle)
    assert peak <= found.schedule.peak_memory_bytes


def test_memory_is_exact_where_nothing_is_rounded() -> None:
    problem = CASES["backward"]
    found = least_period(model_of(problem), 10.0)
    assert found.schedule is not None
    assert run(problem, found.schedule)[1] == found.schedule.peak_memory_bytes


def every_schedule(model: LayerModel) -> list[ModuloSchedule]:
    """Return all schedules of a tiny body: every partition into columns, every site of every launch and wait."""
    body = model.body
    moving = set(body.of_role(GATHER) + body.of_role(REDUCTION))
    partitions: list[tuple[int, ...]] = [()]
    complete = []
    while partitions:
        chosen = partitions.pop()
        covered = {s for b in chosen for s, _ in body.columns[b].members}
        if covered == moving:
            complete.append(chosen)
            continue
        following = min(moving - covered)
        for b, column in enumerate(body.columns):
            slots = {s for s, _ in column.members}
            if following in slots and not slots & covered:
                partitions.append((*chosen, b))
    found = []
    for chosen in complete:
        windows = []
        for b in chosen:
            slot = body.slots[body.columns[b].anchor]
            windows.append(range(slot.launch_site + (slot.role == REDUCTION), slot.wait_site + 1))
        for sites in product(*windows):
            buckets = []
            for b, site in zip(chosen, sites, strict=True):
                slot = body.slots[body.columns[b].anchor]
                launch, wait = (site, slot.wait_site) if slot.role == GATHER else (slot.launch_site, site)
                buckets.append(ModuloBucket(column=body.columns[b], launch_site=launch, wait_site=wait))
            found.append(ModuloSchedule(body=body, period_ticks=0, peak_memory_bytes=0, buckets=tuple(buckets)))
    return found


TINY = {
    "two gathers": layered([replace(FLAT, ticks=(11, 7), shard_bytes=(512, 1024))] * 16, ticks=(12, 1)),
    "two gathers, slow": layered([replace(FLAT, ticks=(11, 7), shard_bytes=(512, 1024))] * 16, ticks=(30, 1)),
    "two gathers, dear copies": layered([replace(FLAT, ticks=(5, 7), shard_bytes=(512, 512))] * 16, ticks=(4, 1), copy_ticks=(1, 9)),
    "a gather and a reduction": layered([replace(FLAT, ticks=(9,), shard_bytes=(512,))] * 16, backward=True, ticks=(8, 1)),
    "a gather and a reduction, slow": layered([replace(FLAT, ticks=(9,), shard_bytes=(512,))] * 16, backward=True, ticks=(14, 2)),
}


@pytest.mark.parametrize("label", TINY)
def test_no_schedule_of_a_tiny_layer_is_better(label: str) -> None:
    """Brute force: all schedules, run through the exact evaluator; least period, then least memory at it."""
    problem = TINY[label]
    model = model_of(problem, reach=1)
    found = least_period(model, 10.0)
    assert found.schedule is not None
    best = []
    for schedule in every_schedule(model):
        layers, peak = run(problem, schedule)
        best.append((-(-sum(layers[6:12]) // 6), peak))
    least = min(period for period, _ in best)
    assert found.schedule.period_ticks == found.bound_ticks == least
    layers, peak = run(problem, found.schedule)
    if "reduction" not in label:  # gradients pile up, so that the last layer, which is not in the middle, decides the peak
        assert min(peak for period, peak in best if period == least) == peak == found.schedule.peak_memory_bytes


def test_less_memory_takes_longer() -> None:
    """The curve: each point proven, longer and with less memory than the one before; a cap between two points gives one of them."""
    problem = layered(10, backward=True, ticks=(60, 2))
    curve = period_curve(problem, budget=30.0)
    assert curve is not None
    assert curve.least.schedule is not None
    assert len(curve.points) >= 3
    for before, after in zip(curve.points, curve.points[1:], strict=False):
        assert before.period_ticks < after.period_ticks
        assert before.peak_memory_bytes > after.peak_memory_bytes
    assert all(point.bound_bytes == point.peak_memory_bytes for point in curve.points)
    capped = least_period(model_of(problem, Caps(memory_cap_bytes=curve.points[1].peak_memory_bytes)), 10.0)
    assert capped.schedule is not None
    assert curve.points[0].period_ticks < capped.schedule.period_ticks <= curve.points[1].period_ticks
    assert capped.schedule.peak_memory_bytes <= curve.points[1].peak_memory_bytes


def test_a_cap_that_nothing_keeps() -> None:
    floor = least_period(model_of(CASES["forward"], Caps(memory_cap_bytes=4096)), 10.0)
    assert floor.schedule is None
    impossible = model_of(CASES["forward"], Caps(memory_cap_bytes=1))
    assert impossible.exists(10**6, 1.0).infeasible


def test_caps_hold() -> None:
    """On buckets, prefetch and bytes in flight: ``run`` verifies them on the graph."""
    problem = CASES["slow network"]
    free = least_period(model_of(problem), 10.0)
    assert free.schedule is not None
    for caps in (Caps(bucket_cap_bytes=8192), Caps(max_prefetch=3), Caps(in_flight_cap_bytes=49152), Caps(max_topo_span=8)):
        found = least_period(model_of(problem, caps), 10.0)
        assert found.schedule is not None
        run(problem, found.schedule)
        assert found.schedule.period_ticks >= free.schedule.period_ticks
    assert all(not bucket.column.several for bucket in least_period(model_of(problem, Caps(bucket_cap_bytes=0)), 5.0).schedule.buckets)  # type: ignore[union-attr]


def test_a_longer_reach_is_never_slower_and_the_answer_is_always_the_same() -> None:
    problem = CASES["slow network"]
    near, far, again = (least_period(model_of(problem, reach=reach), 10.0) for reach in (1, 2, 2))
    assert near.schedule is not None
    assert far.schedule is not None
    assert far.schedule.period_ticks <= near.schedule.period_ticks
    assert far == again


def test_no_layers_no_curve() -> None:
    assert period_curve(layered(2)) is None
