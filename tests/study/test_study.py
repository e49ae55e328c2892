"""``apsched study`` as a user runs it: answers are exact, kept, gone on with after a stop, and the
same with any number of workers.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from apsched.artifacts.schedule_file import bind_schedule, load_schedule
from apsched.config import Caps
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.study.report.pages import lines_of
from apsched.study.rows import FILE
from apsched.study.store import Store
from tests.conftest import Run

TIGHT = ("--memory-cap", "floor+100KiB", "--budget", "0")
FRONTIER = ("--vary", "memory_cap=floor..none:6", "--budget", "1")


def rows(directory: Path) -> list[tuple[object, ...]]:
    """Return what must be the same in every run of the same study: all but times."""
    with sqlite3.connect(directory / FILE) as db:
        return db.execute(
            "select point_id, status, how, memory_cap_bytes, step_ticks, bound_ticks,"
            " peak_memory_bytes, num_launches, report, schedule from results order by point_id"
        ).fetchall()


@pytest.fixture(scope="module")
def frontier(debug_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small frontier, answered in this process."""
    from apsched.cli import main

    directory = tmp_path_factory.mktemp("study") / "one"
    assert (
        main(
            ["study", str(debug_graphs["backward"]), *FRONTIER, "--jobs", "1", "-o", str(directory)]
        )
        == 0
    )
    return directory


def test_every_point_is_exact(frontier: Path, debug_graphs: dict[str, Path]) -> None:
    """The schedule file of each point keeps its cap and has the figures that are kept; a looser cap
    is never slower.
    """
    problem = build_problem(load_graph(debug_graphs["backward"]))
    points = sorted(Store(frontier).points(), key=lambda p: p.outcome.memory_cap_bytes or 2**62)
    assert len(points) == 6
    for tighter, looser in pairwise(points):
        if (tighter.step_time_us or 0) > 1.001 * (looser.step_time_us or 0):
            assert "along caps" not in (tighter.outcome.how, looser.outcome.how)
    for point in points:
        assert point.schedule is not None
        schedule = bind_schedule(load_schedule(frontier / point.schedule), problem)
        assert not verify(problem, schedule, Caps(memory_cap_bytes=point.outcome.memory_cap_bytes))
        timeline = simulate(problem, schedule)
        figures = (timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches)
        assert figures == (
            point.outcome.step_ticks,
            point.outcome.peak_memory_bytes,
            point.outcome.num_launches,
        )
        assert point.outcome.bound_ticks <= timeline.step_time_ticks
        fit = [b["step_time_us"] for b in point.outcome.report["baselines"].values() if b["fits"]]
        assert point.step_time_us is not None
        assert all(point.step_time_us <= baseline for baseline in fit)
    steps = [point.outcome.step_ticks or 0 for point in points]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_a_second_run_solves_nothing(
    run: Run, frontier: Path, debug_graphs: dict[str, Path]
) -> None:
    before = rows(frontier)
    ran = run("study", debug_graphs["backward"], *FRONTIER, "--jobs", "1", "-o", frontier, "--json")
    assert ran.code == 0, ran.stderr
    assert "study: " not in ran.stderr
    assert rows(frontier) == before
    line = json.loads(ran.stdout)["lines"][0]
    assert [point["status"] for point in line["points"]] == ["feasible"] * 5 + [
        line["points"][-1]["status"]
    ]


def test_the_table(run: Run, frontier: Path, debug_graphs: dict[str, Path]) -> None:
    ran = run(
        "study",
        debug_graphs["backward"],
        *FRONTIER,
        "--jobs",
        "1",
        "-o",
        frontier,
        "--slowdown",
        "5%",
    )
    assert ran.code == 0
    for word in (
        "memory cap",
        "bound ms",
        "baseline ms",
        "ms per GiB",
        "binds: ",
        "5 % slower than the fastest",
        "buckets pay at",
        "more bucketing no longer pays",
        "answered from those in",
    ):
        assert word in ran.stdout, word


@pytest.mark.alone
def test_killed_in_the_middle_and_gone_on_with_by_workers(
    frontier: Path, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    """SIGKILL after the first answer; the same command with two workers ends with the points of an
    undisturbed run, and solves no more.
    """
    command = [
        sys.executable,
        "-m",
        "apsched",
        "study",
        str(debug_graphs["backward"]),
        *FRONTIER,
        "-o",
        str(tmp_path / "two"),
    ]
    process = subprocess.Popen(
        [*command, "--jobs", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_answers(tmp_path / "two", 2)
    process.kill()
    process.wait()
    kept = {row[0]: row for row in rows(tmp_path / "two")}
    assert len(kept) >= 2
    done = subprocess.run([*command, "--jobs", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "two") == rows(frontier)
    for row in rows(frontier):
        name = str(row[-1])
        assert (tmp_path / "two" / name).read_bytes() == (frontier / name).read_bytes()


def test_options_of_solve_vary(run: Run, debug_graphs: dict[str, Path]) -> None:
    """One graph, read once: contention and faster compute beside each other; what slows down is
    slower in the answers.
    """
    vary = ("--vary", "contention=none|links,compute=1.5", "--vary", "compute=1x,2x")
    ran = run("study", debug_graphs["backward"], *vary, *TIGHT, "--jobs", "1", "--json", "-o", "s")
    assert ran.code == 0, ran.stderr
    bound = {
        tuple(line["labels"].values()): line["points"][0]["bound_us"]
        for line in json.loads(ran.stdout)["lines"]
    }
    step = {
        tuple(line["labels"].values()): line["points"][0]["step_time_us"]
        for line in json.loads(ran.stdout)["lines"]
    }
    assert len(step) == 4
    slowed = "links,compute=1.5"
    assert step["none", "1x"] < step[slowed, "1x"]
    assert step["none", "2x"] < bound["none", "1x"]


def test_table_and_report_name_values_alike(run: Run, debug_graphs: dict[str, Path]) -> None:
    vary = ("--vary", "bucket_cap=0.5MB,none", "--vary", "memory_cap=1KiB,10MiB,none")
    ran = run("study", debug_graphs["backward"], *vary, "--budget", "0", "--jobs", "1", "-o", "s")
    assert ran.code == 0, ran.stderr
    assert "--memory-cap needs " in ran.stdout
    titles = [line.title for line in lines_of(Store(Path("s")).points())]
    assert titles == ["backward, bucket_cap 500kB", "backward, bucket_cap none"]
    assert all(f"\n{title}:\n" in ran.stdout for title in titles)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("seq=128", "is a graph file; leave --seq out (stated by --vary seq)"),
        ("mesh=fsdp=2", "is a graph file; leave --mesh out (stated by --vary mesh)"),
        ("cluster=h100,foo", "foo"),
        ("costs=nope", "nope"),
        ("keep=all", "--keep: expected forward and backward as FX graphs"),
        ("keep=all", "(stated by --vary keep)"),
        ("accumulate=2", "--accumulate: expected forward and backward as FX graphs"),
    ],
)
def test_a_refused_study_leaves_no_files(
    run: Run, tmp_path: Path, debug_graphs: dict[str, Path], vary: str, message: str
) -> None:
    """An earlier study in the directory stays; the option is named as it was stated."""
    refused = ("study", debug_graphs["backward"], "--vary", vary, "--jobs", "1", "-o", "new/study")
    ran = run(*refused)
    assert ran.code == 2
    assert message in ran.errors[-1]
    assert not (tmp_path / "new").exists()
    Store(tmp_path / "new" / "study", create=True)
    assert run(*refused).code == 2
    assert (tmp_path / "new" / "study" / FILE).is_file()


def test_a_source_is_captured_once(run: Run) -> None:
    """Other costs and other searches need no other capture, and a second run none at all."""
    command = (
        "study",
        "llama3-debug",
        "--mesh",
        "fsdp=4",
        "--seq",
        "64",
        "--direction",
        "forward",
        "--budget",
        "0",
        "--jobs",
        "1",
        "-o",
        "s",
    )
    ran = run(*command, "--vary", "cluster=h100,h200", "--vary", "max_prefetch=1,none")
    assert ran.code == 0, ran.stderr
    assert ran.stderr.count("capture ...") == 1
    assert len(Store(Path("s")).points()) == 4
    assert len({point.graph.graph_id for point in Store(Path("s")).points()}) == 2
    ran = run(*command, "--vary", "cluster=h100,h200", "--vary", "max_prefetch=1,2,none")
    assert ran.code == 0, ran.stderr
    assert "capture ..." not in ran.stderr
    assert len(Store(Path("s")).points()) == 6


@pytest.mark.alone
def test_one_interrupt_ends_cleanly(debug_graphs: dict[str, Path], tmp_path: Path) -> None:
    """What is answered is printed and kept; no worker is left; the exit status is that of an
    interrupt.
    """
    command = [
        sys.executable,
        "-m",
        "apsched",
        "study",
        str(debug_graphs["backward"]),
        "--budget",
        "1",
        "--jobs",
        "2",
    ]
    command += [
        "--vary",
        "memory_cap=floor..none:6",
        "--vary",
        "seed=0..39:40",
        "-o",
        str(tmp_path / "three"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_answers(tmp_path / "three", 1)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stderr.rstrip().endswith("apsched: interrupted")
    assert "Traceback" not in stderr
    assert "the same command resumes the study" in stdout
    for _ in range(
        300
    ):  # what multiprocessing tracks resources with ends a moment later, by itself
        if not in_group(process.pid):
            break
        time.sleep(0.1)
    assert not in_group(process.pid)
    assert Store(tmp_path / "three").points()


def in_group(group: int) -> list[str]:
    """Return the processes of a process group that live; those that ended wait for somebody to
    notice.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            command, _, rest = stat.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(command)
    return found


def wait_for_answers(directory: Path, count: int) -> None:
    """Wait until answers are kept: a schedule file is there a moment before its row, which says
    that it is whole.
    """
    for _ in range(4000):
        time.sleep(0.1)
        if (
            list((directory / "schedules").glob("*.json"))
            and len(Store(directory).points()) >= count
        ):
            return
    raise AssertionError("no answer came")
