"""What process ranks tell each other about a graph: threads in place of processes, one store, every
way to fail.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch.distributed as dist

from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.job import Job
from apsched.compiler.ranks.launches import Launch
from apsched.errors import AgreementError, InfeasibleError

pytestmark = [pytest.mark.alone, pytest.mark.waits]

DEADLINE_S = 1.0
"""Where somebody is waited for in vain."""
PATIENT_S = 60.0
"""Where nobody is: a busy machine may take its time."""
ALL = {"dp": (0, 1, 2, 3)}
MESH = [
    {"tp": (0, 1), "dp": (0, 2)},
    {"tp": (0, 1), "dp": (1, 3)},
    {"tp": (2, 3), "dp": (0, 2)},
    {"tp": (2, 3), "dp": (1, 3)},
]

Body = Callable[[Job], object]


def run(
    *bodies: Body, store: dist.Store | None = None, deadline_s: float = PATIENT_S
) -> list[object]:
    """Run each body as a process rank; return what it returns or raises."""
    store = store or dist.HashStore()
    found: list[object] = [None] * len(bodies)

    def rank(number: int) -> None:
        try:
            found[number] = bodies[number](Job(store, number, deadline_s=deadline_s))
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * PATIENT_S)
    assert not any(thread.is_alive() for thread in threads)
    return found


def launch(number: int, what: str = "all_gather bfloat16 8 -> 32 bytes") -> Launch:
    return Launch(what=what, members=(number,), names=(f"layers.{number}.weight",))


USUAL = tuple(launch(k) for k in range(4))
SWAPPED = (USUAL[0], USUAL[2], USUAL[1], USUAL[3])


def ask(
    groups: Mapping[str, Sequence[int]],
    *,
    graph: str = "one",
    asked: Mapping[str, str] | None = None,
    orders: Mapping[str, Sequence[Launch]] | None = None,
    solve: Callable[[], bytes] | None = None,
    late_s: float = 0.0,
    kept: str = "",
) -> Body:
    """Return a process rank that shares an answer and checks its order; it returns the answer and
    who solved.
    """

    def body(job: Job) -> object:
        time.sleep(late_s)
        with GraphAgreement(job, groups) as agreement:
            answer = agreement.shared(
                graph, asked or {}, solve or (lambda: f"of {job.rank}".encode())
            )
            agreement.check({name: (orders or {}).get(name, USUAL) for name in groups}, kept)
        return answer

    return body


def test_the_lowest_process_rank_solves_for_all():
    assert run(*[ask(ALL)] * 4) == [(b"of 0", 0)] * 4


def test_an_answer_reaches_who_shares_no_group_with_the_solver():
    assert run(*[ask(groups) for groups in MESH]) == [(b"of 0", 0)] * 4


def test_a_large_answer_arrives_whole():
    large = bytes(range(256)) * 12_000
    assert [
        answer for answer, _ in run(*[ask(groups, solve=lambda: large) for groups in MESH])
    ] == [large] * 4


def test_stages_of_a_pipeline_solve_for_themselves():
    first, second = {"dp": (0, 1)}, {"dp": (2, 3)}
    graphs = [
        ask(first, graph="a"),
        ask(first, graph="a"),
        ask(second, graph="b"),
        ask(second, graph="b"),
    ]
    assert run(*graphs) == [(b"of 0", 0)] * 2 + [(b"of 2", 2)] * 2


def test_stages_may_share_a_group_and_have_other_numbers_of_graphs():
    both = {"world": (0, 1, 2, 3)}

    def first(job: Job) -> object:
        return [ask({"dp": (0, 1)}, graph="a")(job), ask({"dp": (0, 1)} | both, graph="b")(job)]

    def second(job: Job) -> object:
        return [ask({"dp": (2, 3)} | both, graph="c")(job)]

    found = run(first, first, second, second)
    assert found == [[(b"of 0", 0), (b"of 0", 0)]] * 2 + [[(b"of 2", 2)]] * 2


def test_the_same_graph_again_is_another_round():
    def twice(job: Job) -> object:
        return [ask(ALL, solve=lambda: b"first")(job), ask(ALL, solve=lambda: b"second")(job)]

    assert run(*[twice] * 4) == [[(b"first", 0), (b"second", 0)]] * 4


def all_say(found: list[object], *words: str) -> None:
    for error in found:
        assert isinstance(error, AgreementError), found
        assert all(word in str(error) for word in words), error


@pytest.mark.parametrize("groups", [[ALL] * 4, MESH], ids=["one group", "mesh"])
@pytest.mark.parametrize("odd", range(4))
def test_another_order_is_an_error_on_every_process_rank(groups, odd):
    bodies = [
        ask(g, orders={"dp": SWAPPED} if rank == odd else None) for rank, g in enumerate(groups)
    ]
    found = run(*bodies)
    all_say(
        found,
        "group 'dp'",
        "launch 2 is all_gather bfloat16 8 -> 32 bytes of layers.",
        "Nothing was launched",
    )
    assert len({str(error) for error in found}) == 1
    assert not any(error.is_silent for error in found)
    if len(groups[0]) == 1:
        others = {0: "1 to 3", 1: "0, 2, 3", 2: "0, 1, 3", 3: "0 to 2"}[odd]
        assert (
            str(found[0])
            == f"process rank {odd} would launch other collectives than process ranks {others} in"
            " group 'dp' of process ranks 0 to 3: launch 2 is all_gather bfloat16 8 -> 32 bytes of"
            " layers.2.weight, there it is all_gather bfloat16 8 -> 32 bytes of"
            " layers.1.weight. Nothing was launched. Run the same model, options, schedule"
            " files and versions on all"
        )


def test_more_than_one_that_differs_is_told():
    found = run(
        *[ask(ALL, orders={"dp": USUAL[:rank]} if rank in (2, 3) else None) for rank in range(4)]
    )
    all_say(
        found,
        "process rank 2 would launch other collectives than process ranks 0, 1 in",
        "(and process rank 3 differ, too)",
    )


def test_a_launch_that_is_missing_is_named():
    short = USUAL[:3]
    found = run(ask(ALL), ask(ALL), ask(ALL, orders={"dp": short}), ask(ALL))
    all_say(
        found, "process rank 2", "it ends after 3 launches, there launch 4 is", "layers.3.weight"
    )
    found = run(*[ask(ALL, orders=None if rank == 2 else {"dp": short}) for rank in range(4)])
    all_say(
        found, "process rank 2", "launch 4 is ", "layers.3.weight, there it ends after 3 launches"
    )


def test_payload_order_counts():
    buckets = [(Launch(what="w", members=order, names=("a", "b")),) for order in ((0, 1), (1, 0))]
    all_say(
        run(*[ask({"dp": (0, 1)}, orders={"dp": b}) for b in buckets]),
        "(collectives [1, 0], there [0, 1]",
    )


def test_another_graph_is_solved_apart_and_judged_by_its_launches():
    other = tuple(launch(k, "reduce_scatter float32 8 -> 2 bytes") for k in range(4))
    all_say(
        run(ask(ALL), ask(ALL), ask(ALL, graph="other", orders={"dp": other}), ask(ALL)),
        "process rank 2",
        "reduce_scatter",
    )


def test_other_settings_are_named():
    found = run(*[ask(ALL, asked={"budget": "20.0" if rank < 3 else "1.0"}) for rank in range(4)])
    all_say(
        found,
        "process rank 3 and process rank 0 have the same graph",
        "budget 1.0 here, 20.0 there; give all process ranks the same",
    )


def test_an_error_of_the_solver_is_the_same_on_all():
    def fails() -> bytes:
        raise InfeasibleError("nothing fits")

    found = run(*[ask(groups, solve=fails) for groups in MESH])
    assert [(type(error), str(error)) for error in found] == [
        (InfeasibleError, "process rank 0: nothing fits")
    ] * 4


def test_a_bug_in_the_solver_is_told_too():
    found = run(*[ask(groups, solve=lambda: b"%d" % (1 // 0)) for groups in MESH])
    assert {str(error) for error in found} == {
        "process rank 0: unexpected ZeroDivisionError: integer division or modulo by zero (a bug of"
        " apsched)"
    }


def test_a_fallback_on_all_process_ranks_goes_on():
    def falls_back(job: Job) -> object:
        with GraphAgreement(job, MESH[job.rank]) as agreement:
            with pytest.raises(InfeasibleError):
                agreement.shared("one", {}, nothing_fits)
            agreement.check(dict.fromkeys(MESH[job.rank], USUAL))
        return "as captured"

    def nothing_fits() -> bytes:
        raise InfeasibleError("nothing fits")

    assert run(*[falls_back] * 4) == ["as captured"] * 4


@pytest.mark.parametrize("groups", [[ALL] * 4, MESH], ids=["one group", "mesh"])
@pytest.mark.parametrize("failing", range(4))
def test_an_error_before_the_talk_is_told_at_once(groups, failing):
    def breaks(job: Job) -> object:
        with GraphAgreement(job, groups[job.rank]):
            raise InfeasibleError("my own")

    bodies = [breaks if rank == failing else ask(g) for rank, g in enumerate(groups)]
    began = time.monotonic()
    found = run(*bodies)
    assert {str(error) for rank, error in enumerate(found) if rank != failing} == {
        f"process rank {failing}: my own"
    }
    assert time.monotonic() - began < 0.5 * PATIENT_S, "told, not timed out"


@pytest.mark.parametrize("gone", range(4))
def test_one_that_never_comes_is_an_error_on_all_others(gone):
    found = run(
        *[(lambda job: None) if rank == gone else ask(groups) for rank, groups in enumerate(MESH)],
        deadline_s=DEADLINE_S,
    )
    all_say(
        [error for rank, error in enumerate(found) if rank != gone],
        "done nothing for",
        "Nothing was launched",
    )


@pytest.mark.parametrize("gone", range(4))
def test_one_that_goes_after_the_answer_is_named(gone):
    def leaves(job: Job) -> object:
        agreement = GraphAgreement(job, ALL)
        return agreement.shared("one", {}, lambda: b"")

    found = run(*[leaves if rank == gone else ask(ALL) for rank in range(4)], deadline_s=DEADLINE_S)
    others = [error for rank, error in enumerate(found) if rank != gone]
    about, seconds = ("its verdict", "1.0") if gone == 0 else ("its launches", "0.8")
    assert {str(error) for error in others} == {
        f"process rank {gone} has not reported {about} in group 'dp' of process ranks 0 to 3, and"
        f" has done nothing for {seconds} s: ended, hanging, or at another graph. Nothing was"
        " launched. See the log of that process rank, or raise deadline_s"
    }
    assert {type(error) for error in others} == {AgreementError}
    assert all(error.is_silent for error in others)


def test_one_that_is_late_is_waited_for():
    deadline_s = 4 * DEADLINE_S
    assert (
        run(ask(ALL), ask(ALL), ask(ALL, late_s=0.5 * deadline_s), ask(ALL), deadline_s=deadline_s)
        == [(b"of 0", 0)] * 4
    )


def test_a_solver_may_take_longer_than_the_deadline():
    def slow() -> bytes:
        time.sleep(2.5 * DEADLINE_S)
        return b"at last"

    assert (
        run(*[ask(groups, solve=slow) for groups in MESH], deadline_s=DEADLINE_S)
        == [(b"at last", 0)] * 4
    )


def test_groups_in_another_order_of_graphs_do_not_hang():
    """Each waits for the other in another group: nobody works, so nobody is waited for."""
    one, two = {"a": (0, 1, 2)}, {"b": (0, 1, 3)}

    def first(job: Job) -> object:
        return [ask(one)(job), ask(two)(job)]

    def second(job: Job) -> object:
        return [ask(two)(job), ask(one)(job)]

    all_say(run(first, second, deadline_s=DEADLINE_S)[:2], "done nothing for")


def waits(*for_ranks: int) -> Body:
    """Return a process rank that waits in vain; it returns those that were silent."""
    return lambda job: job.wait(lambda: for_ranks, 0.8)


def test_two_that_wait_for_each_other_stop_after_the_deadline():
    """Each has worked before, and neither takes the wait of the other for work."""

    def first(job: Job) -> object:
        with job.working():
            time.sleep(0.6 * DEADLINE_S)
        return waits(1)(job)

    assert run(first, waits(0), deadline_s=DEADLINE_S) == [(1,), (0,)]


def test_a_cycle_of_waits_and_who_waits_for_it_stop_after_the_deadline():
    began_s = time.monotonic()
    found = run(waits(1), waits(2), waits(0), waits(0), deadline_s=DEADLINE_S)
    assert found == [(1,), (2,), (0,), (0,)]
    assert time.monotonic() - began_s < 4 * DEADLINE_S


def test_work_at_the_end_of_a_chain_keeps_all_waiting():
    done = threading.Event()

    def waiting(rank: int) -> Body:
        return lambda job: job.wait(lambda: () if done.is_set() else (rank,), 0.8)

    def works(job: Job) -> object:
        with job.working():
            time.sleep(2.5 * DEADLINE_S)
        done.set()
        return "done"

    found = run(waiting(1), waiting(2), waiting(3), works, deadline_s=DEADLINE_S)
    assert found == [(), (), (), "done"]


def test_a_store_that_is_gone_is_an_error():
    class Gone(dist.HashStore):
        def check(self, keys):  # as a TCP store whose server has ended
            raise dist.DistNetworkError("connection reset")

    all_say(run(*[ask(ALL)] * 4, store=Gone()), "the store of the job is gone (connection reset)")


def test_a_store_that_hangs_is_an_error():
    class Hanging(dist.HashStore):
        def check(self, keys):
            time.sleep(10 * DEADLINE_S)
            return False

    all_say(
        run(*[ask(ALL)] * 2, store=Hanging(), deadline_s=DEADLINE_S),
        "the store of the job has not answered for 1 s",
    )


def test_where_one_keeps_its_graph_nobody_may_launch_anything_else():
    """It is three groups away from the first that hears of it."""
    bodies = [ask(groups, kept="no shape" if rank == 3 else "") for rank, groups in enumerate(MESH)]
    found = run(*bodies)
    assert [type(one) for one in found] == [AgreementError] * 4
    assert {str(one) for one in found} == {"no shape"}


def test_who_gives_up_and_who_goes_on_never_part():
    """The last of all comes as the others give up: both may win, never half of them."""

    def body(late_s: float) -> Body:
        def decide(job: Job) -> bool:
            time.sleep(late_s)
            return job.decided("here", 3)

        return decide

    seen = set()
    for late_s in (0.0, 0.28, 0.3, 0.32, 0.6):
        found = run(body(0.0), body(0.0), body(late_s), deadline_s=0.3)
        assert found == [found[0]] * 3
        seen.add(found[0])
    assert seen == {True, False}


def test_nobody_goes_on_where_one_never_hears_that_all_may():
    """It ended after it had said what it will launch."""

    def ends(job: Job) -> object:
        agreement = GraphAgreement(job, ALL)
        agreement.shared("one", {}, lambda: b"")
        job.decided = lambda key, count: True
        agreement.check({"dp": USUAL})
        return "gone"

    found = run(*[ask(ALL)] * 3, ends, deadline_s=DEADLINE_S)
    assert [type(one) for one in found[:3]] == [AgreementError] * 3
    assert "not all of 4 process ranks have received" in str(found[0])


def test_a_failure_between_two_answers_reaches_those_that_wait_for_the_second():
    def body(job: Job) -> object:
        with GraphAgreement(job, ALL) as agreement:
            agreement.shared("one", {}, lambda: b"")
            if job.rank == 0:
                raise InfeasibleError("no second graph")
            return agreement.shared("one", {}, lambda: b"")

    began_s = time.monotonic()
    found = run(*[body] * 4)
    assert [type(one) for one in found] == [InfeasibleError] * 4
    assert time.monotonic() - began_s < PATIENT_S / 2


def states(graph: str = "joint", **settings: str) -> Body:
    """Return a process rank that compares the settings of its joint graph; it returns nothing."""

    def body(job: Job) -> object:
        groups = MESH[job.rank]
        with GraphAgreement(job, groups) as agreement:
            agreement.same_settings(graph, settings)
            agreement.check(dict.fromkeys(groups, USUAL))

    return body


@pytest.mark.parametrize("odd", range(4))
def test_settings_of_a_joint_graph_that_differ_are_named_on_all(odd):
    began_s = time.monotonic()
    found = run(*[states(keep="all" if rank == odd else "none", a="b") for rank in range(4)])
    all_say(found, "has other settings than process rank", ": keep ", "give all process ranks the")
    assert len({str(error) for error in found}) == 1
    assert time.monotonic() - began_s < PATIENT_S / 2


def test_settings_of_other_graphs_may_differ_but_for_the_compiler():
    """Stages of a pipeline."""
    stages = [states(str(rank // 2), keep=str(rank // 2), inductor="False") for rank in range(4)]
    assert run(*stages) == [None] * 4
    found = run(*stages[:3], states("1", keep="1", inductor="True"))
    all_say(found, "inductor True here, False there")


def most(
    groups: Mapping[str, Sequence[int]], *values: int, fails: bool = False, late_s: float = 0.0
) -> Body:
    """Return a process rank that takes the largest of all ``values``, or fails before."""

    def body(job: Job) -> object:
        time.sleep(late_s)
        with GraphAgreement(job, groups) as agreement:
            if fails:
                agreement.give_up(InfeasibleError("no capture"))
                return agreement.check(dict.fromkeys(groups, USUAL), "no capture")
            found = agreement.largest(values)
            assert agreement.largest([0 for _ in values]) == found, "of the first call"
            agreement.check(dict.fromkeys(groups, USUAL))
        return found

    return body


@pytest.mark.parametrize("groups", [[ALL] * 4, MESH], ids=["one group", "mesh"])
@pytest.mark.parametrize("largest", range(4))
def test_all_take_the_largest_of_each_value(groups, largest):
    """Wherever it is, also on a process rank that shares no group with the first."""
    values = [(10 + rank, -rank, 0) for rank in range(4)]
    values[largest] = (99, -7, 5)
    found = run(*[most(g, *v) for g, v in zip(groups, values, strict=True)])
    expected = tuple(max(column) for column in zip(*values, strict=True))
    assert found == [expected] * 4


@pytest.mark.parametrize("odd", range(4))
def test_a_failure_before_it_reaches_all_at_once(odd):
    began_s = time.monotonic()
    found = run(*[most(g, 1, fails=rank == odd) for rank, g in enumerate(MESH)])
    all_say(found, "no capture")
    assert time.monotonic() - began_s < PATIENT_S / 2


def test_one_that_says_nothing_is_named():
    found = run(most(ALL, 1), most(ALL, 2), most(ALL, 3), lambda job: None, deadline_s=DEADLINE_S)
    all_say(found[:3], "process rank 3 has not reported the memory of its device")
