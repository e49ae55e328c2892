"""The pass that fills stalls, on programs worked out by hand."""

import numpy as np

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.reordered import Orders
from apsched.solver.program.program import COPY_OUT, LAUNCH, NODE, WAIT
from apsched.solver.reorder.fill_stalls import FillLimits, Pass, refill
from apsched.solver.reorder.reorder import ComputeMover, _units
from apsched.solver.search.launch_policy import Policy
from apsched.solver.search.local_search import Candidate, Search
from tests.helpers.problems.by_hand import ByHand, line

_OPERATIONS = {"launch": LAUNCH, "wait": WAIT, "out": COPY_OUT}
_ROOM = 2**40


def refilled(
    problem: Problem,
    text: str,
    *buckets: tuple[int, ...],
    max_move: int = 100,
    max_overrun: float = 0.0,
) -> list[str]:
    """Return the names of the compute nodes in the order that the pass makes of ``text``: names of
    compute nodes, ``launch:b`` and ``wait:b`` of bucket b, ``out:c`` of collective c.
    """
    instance = Instance.of(problem)
    pricer, precedence = Pricer(instance), Orders(instance).precedence
    names = [problem.node_names[node] for node in problem.compute_order]
    steps = []
    for word in text.split():
        kind, _, of = word.partition(":")
        steps.append((_OPERATIONS[kind], int(of)) if of else (NODE, names.index(word)))
    operation, argument = np.array(steps, dtype=np.int64).T
    program = Pass(
        order=np.arange(len(names)),
        operation=operation.copy(),
        argument=argument.copy(),
        live_bytes=np.zeros(len(steps), dtype=np.int64),
    )
    units = _units(pricer, pricer.partition(buckets))
    limits = FillLimits(max_delay=10, max_overrun=max_overrun)
    return [names[k] for k in refill(precedence, units, program, _ROOM, max_move, limits).tolist()]


def reduced(hand: ByHand, name: str, group: str, argument: int) -> int:
    """Add an all-reduce on the path and return its wait."""
    start = hand.start(
        "all_reduce", name, argument, 512, 512, group=group, on_path=True, bucketable=False
    )
    return hand.wait(f"{name}_w", start)


def test_copies_that_have_run_leave_no_stall_to_fill() -> None:
    """The all-reduce takes 100 ticks from 13 on; two copies of 100 run behind its launch, so that
    it has ended when it is waited for, and the work of 50 ticks comes last.
    """
    hand = ByHand(prices={"all_reduce": line(100)}, copy_price=line(100))
    shards = [hand.input(f"s{i}", 512, kept=True) for i in range(2)]
    head = hand.compute("head", 10, hand.input("x", 512), size=512)
    gathers = [hand.start("all_gather", f"ag{i}", s, 512, 1024) for i, s in enumerate(shards)]
    partial = hand.compute("partial", 3, head, size=512)
    summed = reduced(hand, "tp", "tp", partial)
    work = hand.compute("work", 50, head, size=512)
    waits = [hand.wait(f"agw{i}", start) for i, start in enumerate(gathers)]
    last = hand.compute("last", 10, summed, *waits, size=512)
    problem = hand.output(reduced(hand, "end", "tp", last), work)
    buckets = (0, 1), (2,), (3,)
    copied = "launch:0 head partial launch:1 work wait:0 out:0 out:1 wait:1 last launch:2 wait:2"
    assert refilled(problem, copied, *buckets) == ["head", "partial", "last", "work"]
    later = "launch:0 head partial launch:1 work wait:0 wait:1 out:0 out:1 last launch:2 wait:2"
    assert refilled(problem, later, *buckets) == ["head", "partial", "work", "last"]


def test_a_stall_that_nothing_may_fill_is_left() -> None:
    """All behind the all-reduce depends on it: the order stays as it is, each block once."""
    hand = ByHand(prices={"all_reduce": line(100)})
    head = hand.compute("head", 10, hand.input("x", 512), size=512)
    at = reduced(hand, "tp", "tp", head)
    for k in range(8):
        at = hand.compute(f"c{k}", 10, at, size=512)
    problem = hand.output(at)
    names = ["head", *(f"c{k}" for k in range(8))]
    text = f"head launch:0 wait:0 {' '.join(names[1:])}"
    assert refilled(problem, text, (0,), max_move=1) == names


def test_a_bucket_is_launched_once_and_when_all_its_inputs_are_there() -> None:
    """Two gradients, there at 10 and at 20, are one reduction of 100 ticks that ends at 120, the
    all-reduce behind it on the group at 130; the stall is too short for the work of 150.
    """
    hand = ByHand(prices={"reduce_scatter": line(100), "all_reduce": line(10)})
    x = hand.input("x", 512)
    gradients = [hand.compute(f"g{i}", 10, x, size=512) for i in range(2)]
    starts = [hand.start("reduce_scatter", f"rs{i}", g, 512, 256) for i, g in enumerate(gradients)]
    partial = hand.compute("partial", 3, *gradients, size=512)
    summed = reduced(hand, "tp", "dp", partial)
    work = hand.compute("work", 150, x, size=512)
    last = hand.compute("last", 10, summed, size=512)
    waits = [hand.wait(f"rsw{i}", start) for i, start in enumerate(starts)]
    problem = hand.output(reduced(hand, "end", "dp", last), work, *waits)
    text = "g0 g1 launch:0 partial launch:1 work wait:1 last launch:2 wait:2 wait:0"
    order = refilled(problem, text, (0, 1), (2,), (3,))
    assert order == ["g0", "g1", "partial", "last", "work"]


def test_gathers_that_can_move_are_launched_where_the_program_has_them_and_others_are_not() -> None:
    hand = ByHand()
    shard, x = hand.input("s", 512, kept=True), hand.input("x", 512)
    gather = hand.start("all_gather", "ag", shard, 512, 1024)
    gradient = hand.compute("g", 10, x, hand.wait("agw", gather), size=512)
    on_path = hand.start(
        "all_gather", "sp", gradient, 512, 1024, group="tp", on_path=True, bucketable=False
    )
    reduction = hand.start("reduce_scatter", "rs", gradient, 512, 256)
    last = hand.compute("last", 10, hand.wait("spw", on_path), size=512)
    problem = hand.output(last, hand.wait("rsw", reduction))
    pricer = Pricer(Instance.of(problem))
    assert [c.on_path for c in problem.collectives] == [False, True, False]
    units = _units(pricer, pricer.partition([(0,), (1,), (2,)]))
    assert units.placed.tolist() == [True, False, False]


def test_an_order_over_the_cap_on_bytes_in_flight_is_no_answer() -> None:
    hand = ByHand(prices={"all_gather": line(10)})
    gather = hand.start("all_gather", "ag", hand.input("s", 512, kept=True), 512, 1024)
    last = hand.compute("last", 10, hand.wait("agw", gather), size=512)
    instance = Instance.of(hand.output(last), Caps(max_compute_move=None))
    search = Search(instance=instance, report=lambda *_: None, max_evaluations=100, floor_bytes=0)
    like = search.evaluate(np.zeros(1, dtype=np.int64), Policy(lead=0.0, copy_out_early=True), None)
    assert isinstance(like, Candidate)
    mover = ComputeMover(instance)
    for cap, fits in ((1024, True), (1023, False)):
        caps = Caps(max_compute_move=None, in_flight_cap_bytes=cap)
        assert (mover.judged(mover.captured, like, caps)[0] is not None) == fits
