"""The benchmark of real execution, on a small scale: what is predicted of memory is what is counted
while each schedule runs.
"""

import itertools
import json
from dataclasses import replace

import pytest

from apsched.errors import InputError
from benchmarks.device.measure import NO_GPU
from benchmarks.execution import worker as execution_worker
from benchmarks.execution.__main__ import main
from benchmarks.execution.checks import Check
from benchmarks.execution.machine import load
from benchmarks.execution.machine.load import Load, others_cores, undisturbed
from benchmarks.execution.machine.slow_network import why_not
from benchmarks.execution.steps.report import inversions

pytestmark = pytest.mark.ranks  # steps that others disturb run again


@pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")
def test_every_schedule_runs_and_holds_the_memory_that_was_predicted(tmp_path, capsys):
    assert main(["--smoke", "--parts", "network", "-o", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    (numbers,) = tmp_path.glob("*.json")
    (run,) = json.loads(numbers.read_text())["networks"].values()
    report = run["found"]
    names = {
        "as_captured",
        "transformer_block",
        "greedy_bytes",
        "greedy_bytes_span",
        "torch",
        "apsched, no cap",
        "apsched, tight cap",
    }
    assert {row["name"] for row in report["schedules"]} == names
    for row in report["schedules"]:
        assert row["name"] in table
        assert len(row["measured_us"]) == len(row["others_cores"]) == 2, (
            "--smoke measures once, whatever runs beside it"
        )
        for graph in row["memory"]:
            assert graph["nodes_apart"] == 0, row["name"]
            assert graph["counted_bytes"] == graph["predicted_bytes"]
    assert (
        min(report["contention"][f"{what}_slowdown"] for what in ("compute", "transfer", "latency"))
        >= 1
    )
    assert report["others_cores"] >= 0
    first, in_rounds = (
        report["captured_beside_profiler_us"][when] for when in ("first", "in_rounds")
    )
    assert len(first) == 2
    assert 2 <= len(in_rounds) <= 3  # the round that warms up is profiled, too
    assert "solved with profiles of 2 steps as captured" in table
    (alone_us,) = (
        row["predicted_alone_us"] for row in report["schedules"] if row["name"] == "as_captured"
    )
    assert (
        max(report["compute_us"], report["transfer_us"])
        < alone_us
        <= report["compute_us"] + report["transfer_us"] + 1
    )  # rounding
    fits = {row["name"]: row["fits"] for row in report["schedules"]}
    assert fits["apsched, tight cap"] == [True, True]


def test_every_rate_runs_with_every_length(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "benchmarks.execution.__main__.run_job",
        lambda *job, timeout_s: asked.append((job[:2], job[2]["seq_len"])),
    )
    monkeypatch.setattr("benchmarks.execution.__main__.markdown", lambda report: "")
    assert (
        main(["--parts", "network", "--rates", "20,40", "--seq", "8,16", "-o", str(tmp_path)]) == 0
    )
    assert asked == [((2, 20), 8), ((2, 20), 16), ((2, 40), 8), ((2, 40), 16)]
    (numbers,) = tmp_path.glob("*.json")
    kept = json.loads(numbers.read_text())["networks"].values()
    assert [(run["megabits_per_s"], run["request"]["seq_len"]) for run in kept] == [
        (20, 8),
        (20, 16),
        (40, 8),
        (40, 16),
    ]


def test_a_network_that_fails_leaves_those_before_it(tmp_path, capsys, monkeypatch):
    def run_job(processes, rate, request, *, timeout_s):
        if rate == 40:
            raise InputError("a job took longer than 3600 s")

    monkeypatch.setattr("benchmarks.execution.__main__.run_job", run_job)
    monkeypatch.setattr("benchmarks.execution.__main__.markdown", lambda report: "")
    assert main(["--parts", "network", "--rates", "20,40", "--seq", "8", "-o", str(tmp_path)]) == 2
    assert "took longer" in capsys.readouterr().err
    (numbers,) = tmp_path.glob("*.json")
    assert list(json.loads(numbers.read_text())["networks"]) == ["2 x 20 Mb/s, 8 tokens"]


def test_a_part_that_is_made_again_leaves_the_others(tmp_path, capsys, monkeypatch):
    tried = [Check(name="a run", passed=True, says="3 passed", seconds=1.5)]
    monkeypatch.setattr("benchmarks.execution.__main__.checks", lambda minutes: iter(tried))
    monkeypatch.setattr("benchmarks.execution.__main__._device", lambda: {"skipped": NO_GPU})
    assert main(["--parts", "checks", "-o", str(tmp_path)]) == 0
    assert main(["--parts", "device", "-o", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("*.md")
    text = written.read_text()
    assert NO_GPU in text
    assert "| a run | yes | 3 passed | 2 |" in text
    tried[0] = Check(name="a run", passed=False, says="1 failed", seconds=1.5)
    assert main(["--parts", "checks", "-o", str(tmp_path)]) == 1
    assert main(["--parts", "all", "-o", str(tmp_path)]) == 2
    known = "network, keep, micro_batches, accumulate, device, checks"
    assert f"--parts: expected some of {known}, found 'all'" in capsys.readouterr().err


def test_an_order_that_was_not_predicted_is_named():
    def row(name, predicted, *measured):
        return {"name": name, "predicted_us": predicted, "measured_us": list(measured)}

    assert inversions([row("a", 1, 10, 11, 12), row("b", 2, 5, 6, 7), row("c", 3, 20, 21, 22)]) == [
        ("b", "a")
    ]
    assert inversions([row("a", 1, 10, 11, 12), row("b", 2, 9, 10, 11)]) == []


def test_a_calibration_that_others_disturbed_is_made_again(monkeypatch):
    monkeypatch.setattr(load, "everywhere", lambda mine: [mine])
    clock = itertools.count(1)
    for busy, chosen, tries, most in (
        ([0.0], 1, 1, 3),
        ([0.5, 0.1], 2, 2, 3),
        ([0.4, 0.9, 0.3, 0.5], 3, 3, 3),
        ([0.4, 0.1], 1, 1, 1),
    ):
        seconds = iter(
            [
                0.0,
                *itertools.chain.from_iterable(
                    (total, total) for total in itertools.accumulate(busy)
                ),
            ]
        )

        def now(seconds=seconds):
            return Load(
                machine_s=next(seconds), stolen_s=0.0, own_s=0.0, clock_s=float(next(clock))
            )

        monkeypatch.setattr(Load, "now", now)
        made = itertools.count(1)
        found, cores = load.least_disturbed(lambda made=made: next(made), most)
        assert (found, cores, next(made)) == (chosen, pytest.approx(min(busy[:tries])), tries + 1)


def test_steps_that_others_disturbed_do_not_count():
    ranks = [Load(machine_s=1.4, stolen_s=0.0, own_s=own_s, clock_s=1.0) for own_s in (0.5, 0.4)]
    assert others_cores(ranks) == pytest.approx(0.5)
    stolen = [
        replace(load, machine_s=0.8, stolen_s=0.3) for load in ranks
    ]  # own time may hold what the host took
    assert others_cores(stolen) == pytest.approx(0.3)
    assert undisturbed([0.0, 0.9, 0.1, 0.0, 0.3, 0.05]) == [0, 2, 3, 5]
    assert undisturbed([0.9, 0.5, 0.4, 0.0, 0.6]) == [1, 2, 3, 4]
    assert undisturbed([0.9, 0.8]) == [0, 1]


@pytest.mark.parametrize(
    ("busy", "most_rounds", "rounds"),
    [
        ((), None, 3),
        ((3,), None, 4),
        ((3, 5), None, 4),
        ((3, 4, 7), None, 6),
        (range(100), None, 6),
        (range(100), 3, 3),
    ],
)
def test_a_step_that_others_disturbed_is_run_again(monkeypatch, busy, most_rounds, rounds):
    """Two schedules, three undisturbed steps of each asked for, at most six run, or as many as
    stated. ``busy`` are timed steps: the first two warm up, and every other round runs b first.
    """
    monkeypatch.setattr(execution_worker, "timed_step", lambda *_: 1.0)
    monkeypatch.setattr(execution_worker, "everywhere", lambda mine: [mine])
    stolen_s = itertools.accumulate(
        stolen for k in itertools.count() for stolen in (0.0, 0.5 * (k in busy))
    )
    clock_s = itertools.count(0.0)
    monkeypatch.setattr(
        Load,
        "now",
        lambda: Load(machine_s=0.0, stolen_s=next(stolen_s), own_s=0.0, clock_s=next(clock_s)),
    )
    times, _ = execution_worker.by_turns(
        {name: lambda: None for name in "ab"}, 3, lambda: None, most_rounds=most_rounds
    )
    assert {name: len(of_steps) for name, of_steps in times.items()} == {"a": rounds, "b": rounds}
