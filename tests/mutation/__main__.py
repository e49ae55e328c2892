"""Make small faults in the solver, the simulator, the memory model, verify, write-back, orders and
aliasing, and see which ones the tests notice.

``python -m tests.mutation --out FILE`` judges 300 faults; interrupted, it goes on where it was.
``--again`` judges those once more that no test has noticed, in the code as it is by now: with more
and slower tests, or with new ones (``--new``: what they notice is no part of the score at first).
``--table`` writes the score, and what no test notices, as Markdown.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

os.environ["NUMBA_DISABLE_JIT"] = "1"  # before numba comes: functions whose code can be exchanged
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests.mutation.judge import Judge
from tests.mutation.mutants import Mutant, found_again, sampled
from tests.mutation.report import counted, is_equivalent, is_noticed, table

ROOT = Path(__file__).resolve().parents[2]
MUTATED = (
    "solver/**/*.py",
    "apsched/schedule/simulate.py",
    "apsched/schedule/memory.py",
    "apsched/schedule/verify.py",
    "apsched/writeback/*.py",
    "apsched/graph/export/order_edges.py",
    "apsched/graph/export/aliasing.py",
    "apsched/graph/export/storages.py",
)
_UNUSED = {"solver/arrays/jit.py"}  # without numba
TESTS = (
    "tests/schedule",
    "tests/solver",
    "tests/writeback",
    "tests/graph",
    "tests/fuzz/test_claims_hold.py",
)
_CONTROL = 25
"""After so many faults the tests of the last one run without it, and must pass."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("mutation.json"))
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files, by a regular expression")
    parser.add_argument("--again", action="store_true", help="those that no test has noticed")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders with tests")
    parser.add_argument(
        "--notes", type=Path, help="what is known of tests; beside --out if not given"
    )
    parser.add_argument(
        "--but", type=Path, help="notes of a run, whose tests have had their say and are left out"
    )
    parser.add_argument("--new", default="$.", help="names of tests that count as new, by a regex")
    parser.add_argument("--table", type=Path, help="write this file, and judge nothing")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of tests a fault")
    parser.add_argument("--slowest", type=float, default=2.0, help="seconds of a test at most")
    parser.add_argument("--cases", type=int, default=3, help="of a parametrized test at most")
    given = parser.parse_args()
    record = json.loads(given.out.read_text()) if given.out.exists() else {"mutants": []}
    if given.table is not None:
        given.table.write_text(table(record))
        return 0
    record |= {"number": given.number, "seed": given.seed}
    files = sorted(
        {str(path.relative_to(ROOT)) for glob in MUTATED for path in ROOT.glob(glob)} - _UNUSED
    )
    done = {entry["name"]: entry for entry in record["mutants"]}
    mutants = _unnoticed(done.values()) if given.again else {}
    if not given.again:
        sample = sampled(ROOT, files, given.number, given.seed)
        mutants = {mutant.name: mutant for mutant in sample if mutant.name not in done}
    mutants = {name: m for name, m in mutants.items() if re.search(given.only, m.file)}

    def work(judge: Judge) -> None:
        for k, (name, mutant) in enumerate(mutants.items()):
            entry = done.setdefault(name, _entry(mutant))
            judge_one(judge, mutant, entry, control=k % _CONTROL == _CONTROL - 1)
            entry["rounds"][-1]["new"] = bool(re.search(given.new, entry["rounds"][-1]["by"]))
            record["mutants"] = list(done.values())
            given.out.write_text(json.dumps(record, indent=1) + "\n")

    judge = Judge(
        root=ROOT,
        files=files,
        most_cases=given.cases,
        slowest_s=given.slowest,
        budget_s=given.budget,
        notes=given.notes or given.out.with_suffix(".tests.json"),
        left_out=frozenset(known for known, said in _noted(given.but).items() if said),
        work=work,
    )
    hypothesis.settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    hypothesis.settings.load_profile("mutation")
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "timeout=0"]
    status = pytest.main([*options, *(str(ROOT / test) for test in given.tests)], plugins=[judge])
    print(", ".join(f"{number} {outcome}" for outcome, number in counted(record).items()))
    return int(status)


def _unnoticed(entries: Iterable[dict]) -> dict[str, Mutant]:
    """Return by name the faults that no test has noticed and that change something, where they are
    in the code as it is.
    """
    found = {}
    for entry in entries:
        if not is_noticed(entry) and not is_equivalent(entry):
            now = entry | entry.get("renamed", {})  # names in it that are others by now
            change = tuple(now[what] for what in ("function", "kind", "before", "after"))
            mutant = found_again(ROOT, entry["name"], change)
            if mutant is not None:
                found[entry["name"]] = mutant
    return found


def judge_one(judge: Judge, mutant: Mutant, entry: dict, *, control: bool) -> None:
    """Judge ``mutant`` and note what came out."""
    chosen = judge.chosen(mutant)
    verdict = judge.judged(mutant, chosen)
    entry["rounds"].append(asdict(verdict) | {"cpu_s": round(verdict.cpu_s, 2)})
    print(
        f"{verdict.outcome:9} {verdict.cpu_s:5.1f} s {mutant.name} {mutant.function}:"
        f" {mutant.kind}: {mutant.before} -> {mutant.after} {verdict.by}",
        flush=True,
    )
    if control and chosen:
        without = judge.judged(None, chosen)
        if without.outcome != "survived":
            sys.exit(f"expected tests that pass without a fault, found {without}")


def _noted(path: Path | None) -> dict:
    return {} if path is None else json.loads(path.read_text())


def _entry(mutant: Mutant) -> dict:
    names = ("name", "file", "function", "kind", "before", "after")
    return {name: getattr(mutant, name) for name in names} | {"line": mutant.lines[0], "rounds": []}


if __name__ == "__main__":
    sys.exit(main())
