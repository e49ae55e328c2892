"""Faults are made where they belong, are the same each time, and are noticed by tests of the lines
that have them.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import code_of, found_again, mutants_of, sampled
from tests.mutation.report import table

SOURCE = '''"""A module: its constants and defaults stay."""

LIMIT = 3


def within(values: list[int], limit: int = 3) -> int:
    """Return how many ``values`` are below 1."""
    found = 0
    for value in values:
        if value < limit and value > 0:
            found += 1
    if found > 99:
        raise ValueError(f"expected up to {99 - 1}, found {found}")
    return found


class Box:
    @property
    def least(self) -> int:
        return min(self.values, default=5)
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "source.py").write_text(SOURCE)
    return tmp_path


def test_faults_are_made_in_bodies_of_functions_alone(root: Path) -> None:
    found = {
        (m.function, m.lines[0], m.kind, m.before, m.after) for m in mutants_of(root, "source.py")
    }
    test = "value < limit and value > 0"
    assert found == {
        ("within", 8, "constant +1", "0", "1"),
        ("within", 8, "constant -1", "0", "-1"),
        ("within", 10, "condition negated", test, f"not ({test})"),
        ("within", 10, "and, or", test, "value < limit or value > 0"),
        ("within", 10, "comparison", "value < limit", "value <= limit"),
        ("within", 10, "comparison", "value > 0", "value >= 0"),
        ("within", 10, "constant +1", "0", "1"),
        ("within", 10, "constant -1", "0", "-1"),
        ("within", 11, "statement removed", "found += 1", "pass"),
        ("within", 11, "arithmetic", "Add", "Sub"),
        ("within", 11, "constant +1", "1", "2"),
        ("within", 11, "constant -1", "1", "0"),
        ("within", 12, "condition negated", "found > 99", "not found > 99"),
        ("within", 12, "comparison", "found > 99", "found >= 99"),
        ("within", 12, "constant +1", "99", "100"),
        ("within", 12, "constant -1", "99", "98"),
        ("within", 14, "return value dropped", "found", "None"),
        ("Box.least", 20, "return value dropped", "min(self.values, default=5)", "None"),
        ("Box.least", 20, "min, max", "min", "max"),
        ("Box.least", 20, "constant +1", "5", "6"),
        ("Box.least", 20, "constant -1", "5", "4"),
    }


def test_the_code_of_a_fault_does_what_it_says(root: Path) -> None:
    def within(values: list[int], limit: int = 3) -> int:
        return 0

    results = {}
    for mutant in mutants_of(root, "source.py"):
        if mutant.function == "within" and mutant.lines[0] != 12:
            within.__code__ = code_of(root, mutant, "source.py")
            results[mutant.lines[0], mutant.kind, mutant.after] = within([0, 1, 2, 3, 4])
    assert results[10, "comparison", "value <= limit"] == 3
    assert results[10, "comparison", "value >= 0"] == 3
    assert results[10, "and, or", "value < limit or value > 0"] == 5
    assert results[11, "arithmetic", "Sub"] == -2
    assert results[14, "return value dropped", "None"] is None


def test_the_sample_is_the_same_each_time_and_has_some_of_every_file(root: Path) -> None:
    (root / "other.py").write_text("def one() -> int:\n    return 1\n")
    one, two = (sampled(root, ["source.py", "other.py"], 10, 7) for _ in range(2))
    assert one == two != sampled(root, ["source.py", "other.py"], 10, 8)
    assert len(one) == 10
    assert {mutant.file for mutant in one} == {"source.py", "other.py"}


JUDGED = """
import sys
from pathlib import Path

import pytest

from tests.mutation.judge import Judge
from tests.mutation.mutants import mutants_of

root = Path(sys.argv[1])

def work(judge):
    for mutant in mutants_of(root, "source.py"):
        verdict = judge.judged(mutant, judge.chosen(mutant))
        print("verdict", mutant.lines[0], mutant.kind, mutant.after, verdict.outcome, sep="|")
    print("verdict", judge.judged(None, [0]).outcome, sep="|")

judge = Judge(root=root, files=["source.py"], most_cases=9, slowest_s=5.0, budget_s=60.0,
              notes=root / "notes.json", work=work)
options = ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(root)]
sys.exit(pytest.main([*options, str(root / "test_source.py")], plugins=[judge]))
"""
TESTS = """
import source

def test_within():
    assert source.within([0, 1, 2, 3, 4]) == 2
"""


def test_a_test_that_runs_the_fault_notices_it(root: Path) -> None:
    """Code that no test runs is uncovered; a fault that changes no result survives."""
    (root / "test_source.py").write_text(TESTS)
    (root / "judged.py").write_text(JUDGED)
    repository = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, str(root / "judged.py"), str(root)],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{repository}"},
        capture_output=True,
        text=True,
        check=True,
    )
    verdicts = [line.split("|")[1:] for line in ran.stdout.splitlines() if line[:8] == "verdict|"]
    said = {tuple(words[:-1]): words[-1] for words in verdicts}
    assert said["8", "constant +1", "1"] == "killed"
    assert said["11", "arithmetic", "Sub"] == "killed"
    assert said["12", "constant +1", "100"] == "survived"
    assert said["20", "min, max", "max"] == "uncovered"
    assert said[()] == "survived"


def test_a_fault_is_found_again_where_its_code_has_moved(root: Path) -> None:
    """Behind other lines, and not where it is no more."""
    file = "source.py"
    faults = mutants_of(root, file)
    text = (root / file).read_text()
    (root / file).write_text('"""Moved."""\n\n\n' + text)
    moved = mutants_of(root, file)
    for before, after in zip(faults, moved, strict=True):
        change = (before.function, before.kind, before.before, before.after)
        assert found_again(root, before.name, change) == after
        assert after.lines[0] == before.lines[0] + 3
    assert found_again(root, faults[0].name, ("gone", "comparison", "a < b", "a <= b")) is None


def test_the_table_has_scores_and_what_is_left() -> None:
    def entry(line: int, *outcomes: str, **more: str) -> dict:
        by = "tests/test_a.py::test_b"
        rounds = [{"outcome": o, "by": by, "new": k > 0} for k, o in enumerate(outcomes)]
        fixed = {"file": "solver/a.py", "function": "f", "kind": "comparison"}
        return fixed | {"line": line, "before": "a < b", "after": "a <= b", "rounds": rounds} | more

    entries = [
        entry(1, "killed"),
        entry(2, "survived", "killed"),
        entry(3, "survived", why="equivalent: a is never b"),
        entry(4, "uncovered"),
        entry(5, "survived", why="gone: the file is no more"),
        entry(6, "survived", why="heuristic: the size of a step"),
        entry(7, "survived", why="left: not looked into"),
    ]
    text = table({"seed": 0, "mutants": entries})
    assert "| solver | 7 | 1 | 2 | 1 | 1 | 1 | 2 |" in text
    assert (
        "| solver/a.py:3 `f` | comparison: `a < b` to `a <= b` | equivalent: a is never b |" in text
    )
    assert "| solver/a.py:4 `f` | comparison: `a < b` to `a <= b` | not judged |" in text
    assert "- solver/a.py:2 comparison `a < b`: `tests/test_a.py::test_b`" in text
