"""Studies along what is kept from forward to backward."""

import json
from pathlib import Path
from typing import Any

import pytest

import apsched
from apsched.errors import InputError
from apsched.quantities import show_bytes
from apsched.study.report.exports import flat
from apsched.study.result import StudyResult
from apsched.study.store import Store
from tests.conftest import Run
from tests.helpers.small_step import OPTIONS, SIZES

CAP = 420 * 1024
VARY: dict[str, Any] = {"keep": ["none", "all", "auto"], "memory_cap": ["420KiB", "none"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    directory = tmp_path_factory.mktemp("keep") / "study"
    return apsched.study("llama3-debug", VARY, output=directory, quiet=True, **SIZES)


@pytest.mark.slow
def test_a_step_is_that_of_solve(run: Run, found: StudyResult) -> None:
    """The choice, its step time, and its peak with the shards that backward does not take."""
    asked = ("--keep", "auto", "--memory-cap", str(CAP), "--json", "-o", "out")
    ran = run("solve", "llama3-debug", *OPTIONS, *asked)
    assert ran.code == 0, ran.stderr
    says = json.loads(ran.stdout)["keep"]
    (step,) = (s for s in found.steps if (s.labels["keep"], s.memory_cap_bytes) == ("auto", CAP))
    assert step.step_time_us == says["step_time_us"]
    assert list(step.kept) == says["kept"]
    assert step.kept_bytes == says["kept_bytes"] > 0
    assert step.peak_memory_bytes == says["peak_memory_bytes"]


@pytest.mark.slow
def test_the_best_choice_is_never_slower_and_is_made_for_each_cap(found: StudyResult) -> None:
    steps = {(s.labels["keep"], s.memory_cap_bytes): s for s in found.steps}
    tight, free = (steps["auto", cap] for cap in (CAP, None))
    assert len(tight.kept) < len(free.kept)
    for (_, cap), step in steps.items():
        best = steps["auto", cap].step_time_us
        assert best is not None
        assert step.step_time_us is None or best <= step.step_time_us


@pytest.mark.slow
def test_resumed_exported_merged_and_compared(run: Run, found: StudyResult) -> None:
    """A second run makes no choice and solves nothing; with and without kept parameters a table has
    the same columns.
    """
    axes = ["--vary=keep=none,all,auto", "--vary=memory_cap=420KiB,none"]
    again = run("study", "llama3-debug", *OPTIONS, *axes, "--jobs", "1", "-o", found.path, "--json")
    assert again.code == 0, again.stderr
    assert "solve" not in again.stderr
    assert "capture" not in again.stderr
    says = json.loads(again.stdout)
    assert [s["step_time_us"] for s in says["steps"]] == [s.step_time_us for s in found.steps]
    kept = sorted({show_bytes(step.kept_bytes) for step in found.steps})
    heading, *rows = found.summary().splitlines()
    assert " kept " in heading
    assert kept != ["0 B"]
    assert all(any(f" {size} " in row for row in rows[: len(found.points)]) for size in kept)
    for step in found.steps:  # a sum of ticks, as solve prints it
        for us in (step.step_time_us, step.bound_us):
            assert us is None or us == round(us * 1000) / 1000
    assert "kept from forward to backward (" in found.summary()
    assert run("study", "export", found.path, "-o", "a.csv").code == 0
    head, *rows = Path("a.csv").read_text().splitlines()
    assert {"keep", "kept_bytes"} <= set(head.split(","))
    assert len(rows) == 12
    assert run("study", "merge", found.path, found.path, "-o", "both").code == 0
    assert len(Store(Path("both")).points()) == 12
    ran = run("study", "compare", found.path, "both")
    assert "12 points in both, 0 only in" in ran.stdout, ran.stderr
    page = run("report", found.path, "-o", "page.html")
    assert page.code == 0, page.stderr


@pytest.mark.slow
def test_a_range_of_caps_begins_where_nothing_is_kept(tmp_path: Path) -> None:
    vary = {"keep": "auto", "memory_cap": "floor..none:2"}
    one, again = (
        apsched.study("llama3-debug", vary, quiet=True, output=tmp_path / "study", **SIZES).steps
        for _ in range(2)
    )
    assert [s.memory_cap_bytes for s in one[1:]] == [None]
    assert one[0].kept_bytes < one[1].kept_bytes
    assert (one[0].step_time_us or 0) > (one[1].step_time_us or 0) > 0
    assert again == one


@pytest.mark.slow
def test_a_step_keeps_the_cap_that_its_line_states() -> None:
    """With a stated choice ``floor`` is the least memory of each graph: the step has two caps."""
    vary = {"memory_cap": ["floor"]}
    study = apsched.study("llama3-debug", vary, keep="all", quiet=True, **SIZES)
    (step,) = study.steps
    caps = sorted(point.outcome.memory_cap_bytes or 0 for point in study.points)
    assert [step.least_cap_bytes, step.memory_cap_bytes] == caps
    assert caps[0] < (step.peak_memory_bytes or 0) <= caps[1]
    shown = " to ".join(show_bytes(cap) for cap in caps)
    assert f"step, memory caps {shown}: " in study.summary()


@pytest.mark.slow
def test_one_graph_is_that_of_solve(run: Run, tmp_path: Path) -> None:
    """The choice under each cap, its step time, which starts from both apart, and its peak; a
    second run makes no choice and solves nothing, also on a study that was merged.
    """
    vary = {"keep": ["none", "all", "auto"], "memory_cap": ["420KiB", "none"]}
    sizes = {**SIZES, "direction": "joint", "output": tmp_path / "study"}
    found = apsched.study("llama3-debug", vary, quiet=True, **sizes)
    steps = {(s.labels["keep"], s.memory_cap_bytes): s for s in found.steps}
    assert len(steps) == 6
    for cap in ("420KiB", "none"):
        words = ("--direction", "joint", "--keep", "auto", "--memory-cap", cap, "--json", "-o", cap)
        ran = run("solve", "llama3-debug", *OPTIONS, *words)
        assert ran.code == 0, ran.stderr
        says = json.loads(ran.stdout)["keep_joint"]
        step = steps["auto", says["memory_cap_bytes"]]
        assert step.step_time_us == says["step_time_us"]
        assert list(step.kept) == says["kept"]
        assert step.kept_bytes == says["kept_bytes"] > 0
        assert step.peak_memory_bytes == says["peak_memory_bytes"]
    for (_, cap_bytes), step in steps.items():
        best = steps["auto", cap_bytes].step_time_us
        assert step.step_time_us is None or (best is not None and best <= step.step_time_us)
    assert len(steps["auto", CAP].kept) < len(steps["auto", None].kept)
    assert "step, keep auto, memory cap 420.00 KiB: " in found.summary()
    axes = ["--vary=keep=none,all,auto", "--vary=memory_cap=420KiB,none", "--direction", "joint"]
    assert run("study", "merge", found.path, found.path, "-o", "both").code == 0
    for path in (found.path, "both"):
        again = run("study", "llama3-debug", *OPTIONS, *axes, "--jobs", "1", "-o", path, "--json")
        assert again.code == 0, again.stderr
        assert not {"solve", "capture"} & set(again.stderr.split())
        kept = [step["kept"] for step in json.loads(again.stdout)["steps"]]
        assert kept == [list(step.kept) for step in found.steps]
    assert run("report", found.path, "-o", "page.html").code == 0


def test_what_cannot_be_kept_is_refused(debug_graphs: dict[str, Path], tmp_path: Path) -> None:
    node = tmp_path / "node.txt"
    node.write_text("norm.weight @node\n")
    for source, vary, more, message in (
        (debug_graphs["forward"], {"keep": "all"}, {}, "found a graph file"),
        ("llama3-debug", {"keep": "auto", "network": "2x"}, SIZES, "state a cluster file"),
        ("llama3-debug", {"keep": "missing.txt"}, SIZES, "readable file"),
        (
            "llama3-debug",
            {"keep": str(node)},
            {**SIZES, "direction": "joint"},
            "over several nodes",
        ),
    ):
        with pytest.raises(InputError, match=message):
            apsched.study(source, vary, quiet=True, **more)


def test_a_change_is_not_asked_of_the_best_choice(run: Run) -> None:
    ran = run("study", "llama3-debug", *OPTIONS, "--keep", "auto", "--if", "memory=-1GiB")
    assert ran.code == 2
    assert "--keep auto: its choice depends on the change of --if" in ran.stderr


def test_points_with_other_options_have_the_same_columns(
    run: Run, debug_graphs: dict[str, Path]
) -> None:
    """An option is described only where it is on: tables and comparisons take both."""
    vary = ("--vary", "second_group=no,yes", "--memory-cap", "none", "--budget", "0")
    ran = run("study", debug_graphs["forward"], *vary, "--jobs", "1", "-o", "groups")
    assert ran.code == 0, ran.stderr
    exported = run("study", "export", "groups", "-o", "groups.csv")
    assert exported.code == 0, exported.stderr
    head, *rows = Path("groups.csv").read_text().splitlines()
    assert "second_group" in head.split(",")
    assert "kept_bytes" not in head.split(",")
    assert len(rows) == 2
    assert len({tuple(row) for row in flat(Store(Path("groups")).points())}) == 1
    compared = run("study", "compare", "groups", "groups")
    assert "2 points in both" in compared.stdout, compared.stderr
