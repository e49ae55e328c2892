"""The file of a study: writers in several processes, better answers, exports, comparisons,
merges.
"""

import csv
import json
import multiprocessing
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from apsched.errors import InputError
from apsched.study.report.merge import compared, merge
from apsched.study.rows import FILE, IN_STEP, InStep
from apsched.study.store import Store
from apsched.study.worker import ALONG, BETTERED, SOLVED, Outcome, better_of
from tests.conftest import Run
from tests.helpers.graph_row import GRAPH
from tests.helpers.spoilt_disks import full_disk

NUM_POINTS, NUM_WRITERS = 20, 4


def outcome(step: int, *, how: str = SOLVED, bound: int = 1) -> Outcome:
    """Return an answer whose schedule file says how fast it is."""
    return Outcome(
        status="feasible",
        how=how,
        memory_cap_bytes=100,
        step_ticks=step,
        bound_ticks=bound,
        bound_source="test",
        peak_memory_bytes=50,
        num_launches=3,
        floor_memory_bytes=10,
        floor_bound_bytes=5,
        solved_floor_bytes=step,
        solved_peak_bytes=step,
        report={"baselines": {}, "step": step},
        schedule=str(step).encode(),
        seconds=0.5,
    )


def write_all(directory: str, seed: int) -> None:
    """Write an answer to every question, in an order of its own."""
    rng = random.Random(seed)
    store = Store(Path(directory), create=True)
    store.add_graph(GRAPH, b"graph")
    for k in rng.sample(range(NUM_POINTS), NUM_POINTS):
        store.add_result(
            f"p{k}", "g", "100", {"k": k}, f"run{seed}", outcome(1000 + (k * 7 + seed * 13) % 50)
        )


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    """Every question is there once, with the best answer that anybody had, and the schedule file is
    that answer's.
    """
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=write_all, args=(str(tmp_path), seed)) for seed in range(NUM_WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * NUM_WRITERS
    points = {point.point_id: point for point in Store(tmp_path).points()}
    assert len(points) == NUM_POINTS
    for k in range(NUM_POINTS):
        best = min(1000 + (k * 7 + seed * 13) % 50 for seed in range(NUM_WRITERS))
        point = points[f"p{k}"]
        assert point.outcome.step_ticks == best
        assert point.outcome.report["step"] == best
        assert Store(tmp_path).schedule_content(point) == str(best).encode()


def test_the_better_of_two_answers() -> None:
    """The faster schedule and the higher bound, whoever found them; what a solve said of ranges of
    caps stays its own.
    """
    solve, along = outcome(100, bound=80), outcome(90, how=ALONG, bound=70)
    for merged in (better_of(solve, along), better_of(along, solve)):
        assert (merged.step_ticks, merged.bound_ticks, merged.how) == (90, 80, BETTERED)
        assert (merged.solved_floor_bytes, merged.solved_peak_bytes) == (100, 100)
        assert merged.report["gap"] == pytest.approx(10 / 90)
    assert better_of(solve, outcome(110, how=ALONG)) is solve
    assert better_of(outcome(90, bound=80), outcome(95, bound=90)).status == "optimal"
    nothing = replace(
        outcome(1),
        status="infeasible",
        step_ticks=None,
        peak_memory_bytes=None,
        num_launches=None,
        schedule=None,
    )
    assert better_of(nothing, along).step_ticks == 90


def test_not_a_study(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the directory of a study"):
        Store(tmp_path)
    (tmp_path / FILE).write_bytes(b"something else, and long enough to be looked at" * 100)
    with pytest.raises(InputError, match="expected the file of a study"):
        Store(tmp_path)


@pytest.fixture(scope="module")
def two_studies(
    debug_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two studies of one graph that share two points of three each; the second searches less."""
    from apsched.cli import main

    folder = tmp_path_factory.mktemp("studies")
    graph = str(debug_graphs["forward"])
    for name, caps in (("a", "floor,none,1GiB"), ("b", "floor,none,2GiB")):
        command = [
            "study",
            graph,
            "--vary",
            f"memory_cap={caps}",
            "--budget",
            "0",
            "--jobs",
            "1",
            "-o",
            str(folder / name),
        ]
        assert main(command) == 0
    return folder / "a", folder / "b"


def test_compare(run: Run, two_studies: tuple[Path, Path]) -> None:
    ran = run("study", "compare", *two_studies)
    assert ran.code == 0, ran.stderr
    assert "2 points in both, 1 only in" in " ".join(ran.stdout.split())
    found = json.loads(run("study", "compare", *two_studies, "--json").stdout)
    assert len(found["pairs"]) == 2
    assert all(pair["gain"] == 0 and not pair["proven"] for pair in found["pairs"])
    assert (len(found["only_first"]), len(found["only_second"])) == (1, 1)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"seed": 1}, {"seed": 2}, "they differ in seed; add --ignore seed"),
        ({}, {"noise": 0.2, "robust": "mean"}, "add --ignore noise --ignore robust"),
    ],
)
def test_studies_without_a_common_question_say_why(
    run: Run, tmp_path: Path, first: dict, second: dict, text: str
) -> None:
    for name, described in (("a", first), ("b", second)):
        store = Store(tmp_path / name, create=True)
        store.add_graph(GRAPH, b"graph")
        store.add_result(name, "g", "100", {"k": 1} | described, "run", outcome(1000))
    ran = run("study", "compare", tmp_path / "a", tmp_path / "b")
    assert ran.code == 0, ran.stderr
    assert text in ran.stdout
    ignored = [word for name in second for word in ("--ignore", name)]
    again = run("study", "compare", tmp_path / "a", tmp_path / "b", *ignored)
    assert "1 points in both" in again.stdout


def test_pairs_are_in_the_order_of_their_options(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_all(str(tmp_path / name), seed)
    found = compared(Store(tmp_path / "a").points(), Store(tmp_path / "b").points())
    assert [pair.one.described["k"] for pair in found.pairs] == list(range(NUM_POINTS))


@pytest.mark.parametrize("content", [b"", b'{"format": ', None])
def test_a_point_whose_schedule_file_is_broken_is_solved_again(
    tmp_path: Path, content: bytes | None
) -> None:
    store = Store(tmp_path, create=True)
    store.add_graph(GRAPH, b"graph")
    store.add_result("p", "g", "100", {}, "run", outcome(1000))
    (point,) = store.points()
    path = tmp_path / (point.schedule or "")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert store.point("p") is None
    store.add_result("p", "g", "100", {}, "again", outcome(1000))
    assert store.point("p") is not None
    assert path.read_bytes() == b"1000"


def test_an_ignored_option_has_one_value_in_each_study(tmp_path: Path) -> None:
    write_all(str(tmp_path), 1)
    points = Store(tmp_path).points()
    with pytest.raises(InputError, match=r"--ignore: expected one of .*k.*; found 'bogus'"):
        compared(points, points, ("bogus",))
    with pytest.raises(InputError, match=rf"\({NUM_POINTS} points, 1 without these options\)"):
        compared(points, points, ("k",))
    one, other = points[:1], [replace(points[0], described={"k": -1})]
    assert len(compared(one, other).pairs) == 0
    assert len(compared(one, other, ("k",)).pairs) == 1


def test_merge_and_export(run: Run, two_studies: tuple[Path, Path], tmp_path: Path) -> None:
    """A merged study has every point of both, once, with its files; a table has a row for each."""
    ran = run("study", "merge", *two_studies, "-o", tmp_path / "both")
    assert ran.code == 0, ran.stderr
    points = Store(tmp_path / "both").points()
    names = {point.point_id for path in two_studies for point in Store(path).points()}
    assert {point.point_id for point in points} == names
    assert len(names) == 4
    assert all((tmp_path / "both" / str(point.schedule)).is_file() for point in points)
    assert len(Store(tmp_path / "both").runs()) == 2
    ran = run("study", "export", tmp_path / "both", "-o", tmp_path / "table.csv")
    assert ran.code == 0, ran.stderr
    with open(tmp_path / "table.csv") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4
    for row in table:
        point = next(point for point in points if point.point_id == row["point_id"])
        assert float(row["step_time_us"]) == point.step_time_us
        assert row["source"] == "step.forward.graph"
        assert float(row["as_captured_us"]) >= float(row["step_time_us"])
    assert run("study", "export", tmp_path / "both", "-o", tmp_path / "table.txt").code == 2
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run("study", "export", tmp_path / "both", "-o", tmp_path / "table.parquet").code == 0
    rows = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    assert [row["step_time_us"] for row in rows] == [float(row["step_time_us"]) for row in table]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "a"), "two studies"),
        (("merge", "a"), "-o DIR"),
        (("export", "nowhere", "-o", "x.csv"), "expected the directory of a study"),
        (("llama3-debug", "llama3-8b"), "unrecognized arguments: llama3-8b"),
        (("llama3-debug", "--engine", "ray://here"), "expected dask://host:port"),
        (("llama3-debug", "--engine", "dask://here:1", "--jobs", "2"), "--jobs"),
        (("llama3-debug", "--if", "network=2x", "--vary", "seq=8"), "leave one out"),
        (("llama3-debug", "--vary", "memory_cap=none", "--memory-cap", "none"), "leave one out"),
        (("llama3-debug", "--vary", "bitwise=maybe"), "expected yes or no"),
        (("llama3-debug", "--vary", "cluster=h100,h1000"), "expected the name of a cluster"),
    ],
)
def test_wrong_use(run: Run, words: tuple[str, ...], said: str) -> None:
    ran = run("study", *words)
    assert ran.code == 2
    assert said in ran.errors[0]


def test_a_full_disk_leaves_no_part_of_a_new_study(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with full_disk(disk):
        before = sorted(path.name for path in disk.iterdir())
        with pytest.raises((InputError, OSError)):
            Store(disk / "new" / "study", create=True)
        assert sorted(path.name for path in disk.iterdir()) == before


def test_an_answer_that_the_disk_has_no_room_for_leaves_the_others_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, create=True)
    store.add_graph(GRAPH, b"graph")
    store.add_result("p1", "g", "none", {}, "run", outcome(7))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("apsched.study.store.write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        store.add_result("p2", "g", "none", {}, "run", outcome(8))
    (point,) = Store(tmp_path).points()
    assert point.point_id == "p1"
    assert store.schedule_content(point) == b"7"


def test_one_graph_has_the_part_of_each_step_that_it_is_in(tmp_path: Path) -> None:
    """Captures and points keep it, not the graph; a merged study has it, too."""
    store = Store(tmp_path / "a", create=True)
    store.add_graph(GRAPH, b"graph")
    parts = InStep(num_micro_batches=2, kept=("w",), kept_bytes=8), InStep(gradient_bytes=4)
    for k, part in enumerate(parts):
        store.add_capture(f"c{k}", [replace(GRAPH, in_step=part)])
        report = {"baselines": {}, IN_STEP: asdict(part)}
        answer = replace(outcome(7), report=report)
        store.add_result(f"p{k}", "g", "100", {}, "run", answer)
    both = Store(tmp_path / "b", create=True)
    merge([store], both)
    for found in (store, both):
        captured = [found.capture(f"c{k}") for k in range(2)]
        assert [rows and rows[0].in_step for rows in captured] == list(parts)
        assert [point.graph.in_step for point in found.points()] == list(parts)


def test_a_study_of_an_older_version_names_what_its_graphs_keep(tmp_path: Path) -> None:
    kept = {"names": ["w"], "bytes": 8, "shard_bytes": 2}
    store = Store(tmp_path, create=True)
    store.add_graph(replace(GRAPH, described={"kept": kept}), b"graph")
    store.copy_capture(("c", json.dumps(["g"])))
    rows = store.capture("c")
    assert rows is not None
    assert rows[0].in_step == InStep(kept=("w",), kept_bytes=8, shard_bytes=2)
