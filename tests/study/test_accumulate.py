"""Studies of several micro-batches in a row."""

import json
from typing import Any

import pytest

import apsched
from apsched.errors import InputError
from apsched.study.result import StudyResult
from tests.conftest import Run
from tests.helpers.small_step import OPTIONS, SIZES

CAP = 480 * 1024
AXES: dict[str, Any] = {"accumulate": ["none", 3], "memory_cap": ["480KiB", "none"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    directory = tmp_path_factory.mktemp("accumulate") / "study"
    return apsched.study("llama3-debug", AXES, output=directory, quiet=True, **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("cap_bytes", [CAP, None])
def test_a_step_is_that_of_solve(run: Run, found: StudyResult, cap_bytes: int | None) -> None:
    """Step time, peak with all that is alive beside each graph, and the choice."""
    cap = "none" if cap_bytes is None else str(cap_bytes)
    asked = ("--accumulate", "3", "--memory-cap", cap, "--json", "-o", "out")
    ran = run("solve", "llama3-debug", *OPTIONS, *asked)
    assert ran.code == 0, ran.stderr
    says = json.loads(ran.stdout)["accumulate"]
    steps = {(s.num_micro_batches, s.memory_cap_bytes): s for s in found.steps}
    step = steps[3, cap_bytes]
    assert step.step_time_us == pytest.approx(says["step_time_us"])
    assert step.peak_memory_bytes == says["peak_memory_bytes"]
    assert list(step.kept) == says["choice"]
    assert len(step.kept) > 0
    assert step.bound_us <= step.step_time_us + 1e-6
    one = steps[1, cap_bytes]
    assert one.step_time_us is not None
    assert step.step_time_us < 3 * one.step_time_us
    assert one.kept == ()


@pytest.mark.slow
def test_the_memory_of_the_device_counts_gradients_as_solve_does(run: Run) -> None:
    ran = run("solve", "llama3-debug", *OPTIONS, "--accumulate", "2", "--json", "-o", "out")
    assert ran.code == 0, ran.stderr
    says = json.loads(ran.stdout)
    study = apsched.study("llama3-debug", accumulate=2, quiet=True, **SIZES)
    (step,) = study.steps
    assert step.step_time_us == pytest.approx(says["accumulate"]["step_time_us"])
    assert step.memory_cap_bytes == says["accumulate"]["memory_cap_bytes"]
    solved = {g["name"]: g["device_memory"]["left_bytes"] for g in says["graphs"]}
    in_study = {p.graph.name: p.outcome.report["device_memory"] for p in study.points}
    assert {name: account["left_bytes"] for name, account in in_study.items()} == solved
    assert any(account["gradient_bytes"] for account in in_study.values())


@pytest.mark.slow
def test_resumed_exported_and_merged(run: Run, found: StudyResult) -> None:
    assert found.path is not None
    axes = ["--vary=accumulate=none,3", "--vary=memory_cap=480KiB,none"]
    again = run("study", "llama3-debug", *OPTIONS, *axes, "--jobs", "1", "-o", found.path, "--json")
    assert again.code == 0, again.stderr
    assert "solve" not in again.stderr
    says = json.loads(again.stdout)
    assert [s["step_time_us"] for s in says["steps"]] == [s.step_time_us for s in found.steps]
    assert "step of 3 micro-batches" in found.summary()
    assert "gathered until the next micro-batch" in found.summary()
    assert run("study", "export", found.path, "-o", "a.csv").code == 0
    assert run("study", "merge", found.path, found.path, "-o", "both").code == 0
    merged = run("study", "llama3-debug", *OPTIONS, *axes, "--jobs", "1", "-o", "both", "--json")
    assert "solve" not in merged.stderr
    assert json.loads(merged.stdout)["steps"] == says["steps"]
    page = run("report", found.path, "-o", "page.html")
    assert page.code == 0, page.stderr


def test_a_stated_choice() -> None:
    """The graphs are made once, and solved under each cap."""
    study = apsched.study(
        "llama3-debug",
        {"memory_cap": ["1MiB", "none"]},
        accumulate=2,
        keep="all",
        quiet=True,
        **SIZES,
    )
    assert [step.memory_cap_bytes for step in study.steps] == [2**20, None]
    assert {p.graph.name for p in study.points} == {
        "forward",
        "backward",
        "forward-2",
        "backward-2",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "none"}, "expected a choice of the parameters that micro-batches share"),
        ({"direction": "backward"}, "expected forward and backward apart"),
        ({"vary": {"network": "2x"}}, "state a cluster file"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        apsched.study("llama3-debug", accumulate=2, quiet=True, **(SIZES | options))
