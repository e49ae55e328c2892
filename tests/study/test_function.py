"""``apsched.study`` answers what the command does, in this process and elsewhere."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import apsched
from apsched.errors import InputError
from apsched.study.result import StudyResult
from tests.conftest import Run

VARY = {"memory_cap": "floor..none:3", "seed": [0, 1]}


def steps(found: StudyResult) -> list[tuple[str, str | None, float | None]]:
    return [(p.graph.name, p.memory_cap, p.step_time_us) for p in found.points]


@pytest.fixture(scope="module")
def found(debug_graphs: dict[str, Path]) -> StudyResult:
    return apsched.study(debug_graphs["forward"], VARY, budget=0.1, quiet=True)


def test_it_answers_what_the_command_does(
    run: Run, debug_graphs: dict[str, Path], found: StudyResult
) -> None:
    vary = [word for axis in ("memory_cap=floor..none:3", "seed=0,1") for word in ("--vary", axis)]
    ran = run("study", debug_graphs["forward"], *vary, "--budget", "0.1", "-o", "out", "--json")
    assert ran.code == 0, ran.stderr
    lines = json.loads(ran.stdout)["lines"]
    assert [p["step_time_us"] for line in lines for p in line["points"]] == [
        p.step_time_us for p in found.points
    ]
    assert [dict(line.labels) for line in found.lines] == [{"seed": "0"}, {"seed": "1"}]
    again = apsched.study(debug_graphs["forward"], VARY, budget=0.1, output="out", quiet=True)
    assert steps(again) == steps(found)
    assert again.path == Path("out")
    exported = run("study", "export", "out", "-o", "out.csv")
    assert exported.code == 0, exported.stderr
    head, *rows = Path("out.csv").read_text().splitlines()
    assert head.split(",") == list(again.rows()[0])
    assert len(rows) == len(again.points)


def test_it_is_a_frame_and_a_text(found: StudyResult) -> None:
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert len(frame) == len(found.points) == 6
    assert list(frame["step_time_us"]) == [point.step_time_us for point in found.points]
    assert set(frame["schedule_from"]) <= {"solve", "short search", "another cap"}
    assert "memory cap" in found.summary()
    assert len(repr(found).splitlines()) == 3
    assert "nothing is kept" in repr(found)


def test_progress_names_the_question(
    debug_graphs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    apsched.study(debug_graphs["forward"], {"seed": [0, 1]}, budget=0.1, memory_cap="1GiB")
    lines = capsys.readouterr().err.splitlines()
    first, *_, last = (line for line in lines if line.startswith("study: "))
    assert first == "study: 0 of 2 points, 0 s; seed 0, forward, memory cap 1.00 GiB"
    assert last.startswith("study: 2 of 2 points")


@pytest.mark.alone
def test_an_executor_or_dask_answer_the_same(
    debug_graphs: dict[str, Path], found: StudyResult
) -> None:
    distributed = pytest.importorskip("distributed")
    source = debug_graphs["forward"]
    with ThreadPoolExecutor(2) as pool:
        threads = apsched.study(source, VARY, budget=0.1, executor=pool, quiet=True)
        assert pool.submit(int).result() == 0, "it is not shut down"
    assert steps(threads) == steps(found)
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        dask = apsched.study(source, VARY, budget=0.1, client=client, quiet=True)
        assert client.submit(int).result() == 0, "it stays connected"
    assert steps(dask) == steps(found)


@pytest.mark.parametrize(
    ("vary", "options", "message"),
    [
        ({"memory": "1GiB"}, {}, r"^vary: expected one of .*memory_cap"),
        ({"seed": "x"}, {}, "seed: expected"),
        ({}, {"budgett": 1}, "unrecognized arguments: budgett"),
        ({}, {"jobs": 0}, "jobs: expected a count of at least 1; found 0"),
        ({}, {"what_if": "network=2x"}, "expected an option of a grid; found 'what_if'"),
        ({"memory_cap": "floor..none:3"}, {"memory_cap": "1GiB"}, "memory_cap: vary memory_cap"),
    ],
)
def test_what_cannot_be_used_is_named_as_it_was_given(
    debug_graphs: dict[str, Path], vary: dict[str, object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        apsched.study(debug_graphs["forward"], vary, quiet=True, **options)
    with pytest.raises(InputError, match="expected an executor or a client; found both"):
        apsched.study(debug_graphs["forward"], executor=object(), client=object())
