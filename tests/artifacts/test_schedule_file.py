"""Schedule files: what is written is what is read, and anything else is refused with its name and
what differs.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apsched.artifacts.replay import replay
from apsched.artifacts.schedule_file import (
    bind_schedule,
    dump_schedule,
    load_schedule,
    save_schedule,
)
from apsched.config import Caps
from apsched.errors import InputError
from apsched.pipeline.result import Result, result_of
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolveResult
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import simulate
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import random_problem, with_coalesced_price


def a_result(problem: Problem, schedule: Schedule, caps: Caps | None = None) -> Result:
    """Return ``schedule`` as if the solver had found it."""
    timeline = simulate(problem, schedule)
    best = Scored(
        name="apsched",
        schedule=schedule,
        step_time_ticks=timeline.step_time_ticks,
        exposed_ticks=timeline.exposed_ticks,
        peak_memory_bytes=timeline.peak_memory_bytes,
        num_launches=timeline.num_launches,
        violations=(),
    )
    answer = SolveResult(
        status="feasible",
        best=best,
        bound_ticks=timeline.compute_ticks,
        bound_source="compute",
        baselines=(best,),
        floor_memory_bytes=timeline.peak_memory_bytes,
        floor_bound_bytes=0,
        fastest_ticks=timeline.step_time_ticks,
        time_limit_ticks=timeline.step_time_ticks,
        peak_bound_bytes=0,
        launches_bound=1,
        solved_by="random",
        deterministic_work=0.0,
        infeasibility=None,
    )
    return result_of(
        problem, caps or Caps(max_compute_move=None), answer, cluster="h100", seconds={}
    )


def bucketed(seed: int = 0) -> Result:
    """Return a random schedule that has buckets, gathers among them."""
    for k in range(seed, seed + 1000):
        problem = random_problem(random.Random(k), max_collectives=6)
        schedule = random_schedule(problem, k)
        if any(
            problem.keys[problem.collectives[b.members[0]].key].kind == "all_gather"
            for b in schedule.buckets
        ):
            return a_result(problem, schedule)
    raise AssertionError("no such problem among a thousand")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_what_is_read(seed: int, tmp_path: Path) -> None:
    problem = random_problem(random.Random(seed), max_collectives=6)
    schedule = random_schedule(problem, seed)
    caps = Caps(max_prefetch=1000, max_compute_move=100)
    save_schedule(tmp_path / "s.json", a_result(problem, schedule, caps))
    file = load_schedule(tmp_path / "s.json")
    assert bind_schedule(file, problem) == schedule
    assert file.caps == caps
    assert replay(problem, file).step_time_ticks == simulate(problem, schedule).step_time_ticks


def test_equal_input_gives_equal_bytes() -> None:
    """Neither times nor paths nor the order of sets get into the file."""
    assert dump_schedule(bucketed()) == dump_schedule(bucketed())


def test_a_person_can_read_it() -> None:
    """One step a line, buckets with the names of nodes and modules."""
    result = bucketed()
    text = dump_schedule(result).decode()
    data = json.loads(text)
    assert text.count("\n") > len(data["steps"])
    bucket = data["buckets"][0]
    start = result.problem.collectives[result.answer.best.schedule.buckets[0].members[0]].start
    assert bucket["members"][0] == {
        "rank": start,
        "node": result.problem.node_names[start],
        "module": result.problem.modules[start],
    }
    assert data["result"]["step_time_us"] == result.step_time_us
    assert data["versions"]["apsched"]
    assert not {"time", "date", "path", "host"} & set(data)


def test_the_form_of_a_bucket_is_kept_and_only_then_told(tmp_path: Path) -> None:
    """A file of flat buckets is what it was before there was another form; older readers refuse one
    that has it.
    """
    result = bucketed()
    assert json.loads(dump_schedule(result))["version"] == 1
    assert b'"form"' not in dump_schedule(result)
    rng = random.Random(5)
    problem = with_coalesced_price(result.problem, rng)
    coalesced = next(
        s
        for s in (random_schedule(problem, seed) for seed in range(99))
        if any(b.coalesced for b in s.buckets)
    )
    save_schedule(tmp_path / "s.json", a_result(problem, coalesced))
    assert json.loads((tmp_path / "s.json").read_text())["version"] == 2
    assert bind_schedule(load_schedule(tmp_path / "s.json"), problem) == coalesced


def test_names_of_nodes_are_for_people(tmp_path: Path) -> None:
    """Process ranks of one job name nodes differently and still share a schedule: equal hash, other
    names.
    """
    result = bucketed()
    save_schedule(tmp_path / "s.json", result)
    renamed = replace(
        result.problem, node_names=tuple(f"n{i}" for i in range(result.problem.num_nodes))
    )
    assert bind_schedule(load_schedule(tmp_path / "s.json"), renamed) == result.schedule


def test_another_graph_is_refused_with_what_differs(tmp_path: Path) -> None:
    result = bucketed()
    save_schedule(tmp_path / "s.json", result)
    file = load_schedule(tmp_path / "s.json")
    other = replace(
        result.problem,
        graph_hash="f" * 64,
        name="backward",
        node_names=("odd", *result.problem.node_names[1:]),
    )
    with pytest.raises(InputError) as caught:
        bind_schedule(file, other)
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 's.json'}: the schedule belongs to another graph: name "
    )
    assert "'backward' here" in message
    assert f"node {result.problem.node_names[0]!r} only there" in message
    same_names = replace(result.problem, graph_hash="f" * 64)
    with pytest.raises(InputError, match="the same node names, but other dependences"):
        bind_schedule(file, same_names)


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    content = dump_schedule(bucketed())
    path = tmp_path / "cut.json"
    for size in range(0, len(content) - 3, max(1, len(content) // 40)):
        path.write_bytes(content[:size])
        with pytest.raises(InputError, match=r"cut\.json: expected a schedule file"):
            load_schedule(path)


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", "something"), "expected a schedule file of apsched"),
        (
            _set("version", 3),
            "expected version 2 of the file or older, found version 3; update apsched",
        ),
        (_set("version", "1"), "expected a version number"),
        (_set("version", True), "expected a version number"),
        (_set("version", 0), "expected a version number"),
        (_set("graph", None), "expected an object at 'graph', found nothing"),
        (_set("graph", {"name": "forward"}), "expected a string at graph.hash, found None"),
        (_set("caps", []), "expected an object at 'caps', found list"),
        (_set("caps", {"memory": 3}), "expected caps among memory_cap_bytes, .* found 'memory'"),
        (_set("caps", {"max_prefetch": "many"}), "caps: max_prefetch: expected a whole number"),
        (_set("costs", 3), "expected an object at 'costs'"),
        (_set("steps", {}), "expected a list at 'steps', found dict"),
        (_set("steps", [1, 2]), "expected node names and bucket steps as strings"),
        (
            _set("buckets", [{"members": [{"node": "x"}]}]),
            "expected bucket 0 to list its members by rank and node",
        ),
        (_set("buckets", ["x"]), "expected bucket 0 to list its members"),
        (
            lambda data: data["buckets"][0].__setitem__("form", "round"),
            "expected the form of bucket 0 to be flat or coalesced, found str",
        ),
        (lambda data: data.pop("buckets"), "expected a list at 'buckets', found nothing"),
    ],
)
def test_a_foreign_file_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    data = json.loads(dump_schedule(bucketed()))
    change(data)
    path = tmp_path / "s.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as caught:
        load_schedule(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("999999 mm", "expected nodes below"),
        ("copy_in 999", "found 'copy_in 999'"),
        ("launch 0", "found 'launch 0'"),
        ("mm", "found 'mm'"),
        ("copy_out 0 primals_1", "expected a start node of the graph, found node 0"),
        ("", "found ''"),
    ],
)
def test_a_step_that_means_nothing_is_refused(step: str, message: str, tmp_path: Path) -> None:
    result = bucketed()
    data = json.loads(dump_schedule(result))
    data["steps"][0] = step
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        bind_schedule(load_schedule(tmp_path / "s.json"), result.problem)


def test_a_changed_order_is_refused(tmp_path: Path) -> None:
    """A file that somebody edited by hand is checked like any other schedule."""
    result = bucketed()
    data = json.loads(dump_schedule(result))
    data["steps"].reverse()
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(
        InputError, match=r"not a schedule of this graph within its caps: .*comes before"
    ):
        replay(result.problem, load_schedule(tmp_path / "s.json"))


def test_a_cap_that_is_broken_is_refused(tmp_path: Path) -> None:
    result = bucketed()
    data = json.loads(dump_schedule(result))
    data["caps"]["memory_cap_bytes"] = result.best.peak_memory_bytes - 1
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"live bytes at .*, more than the cap"):
        replay(result.problem, load_schedule(tmp_path / "s.json"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the schedule file .*nowhere\.json"):
        load_schedule(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="Is a directory"):
        load_schedule(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"b\.json"):
        load_schedule(tmp_path / "b.json")
