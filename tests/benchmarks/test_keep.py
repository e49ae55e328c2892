"""The benchmark of what is kept: it runs on a small model, and fails where a choice that people
make is faster.
"""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from benchmarks.common.choices import beaten
from benchmarks.keep.__main__ import main
from benchmarks.keep.cases import FLOOR, NO_CAP, SMOKE, Row, _row, measured

ROW = Row(
    case="a step",
    cap="device",
    choice="all",
    num_kept=3,
    num_in_node=0,
    num_again=0,
    kept_gib=1.0,
    forward_ms=1.0,
    backward_ms=2.0,
    step_ms=3.0,
    peak_gib=4.0,
    gap=None,
    cpu_s=None,
)
FOUND = replace(ROW, choice="apsched", gap=0.01, cpu_s=5.0)


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "keep.md"
    assert main(["--smoke", "-o", str(out)]) == 0
    rows = [Row(**row) for row in json.loads(out.with_suffix(".json").read_text())]
    assert [row.choice for row in rows] == ["none", "all", "last_block", "fsdp2", "apsched"]
    assert sum(line.startswith("| llama3") for line in out.read_text().splitlines()) == len(rows)
    assert rows[-1].num_kept == rows[1].num_kept == rows[0].num_again == 20
    assert rows[-1].num_again == 0
    assert not beaten(rows)
    table = out.read_text()
    monkeypatch.setattr("benchmarks.keep.__main__.measured", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["--smoke", "-o", str(out)])
    assert main(["--smoke", "-o", str(out), "--resume"]) == 0  # every case is in the table
    assert out.read_text() == table


@pytest.mark.slow
def test_without_a_cap_a_step_fits_that_the_device_does_not_hold() -> None:
    assert all(case.without_cap and not case.on_device for case in NO_CAP)
    case = replace(SMOKE[0], model="llama3-70b", seq_len=65536, num_layers=1, without_cap=True)
    rows = [row for row in measured(case) if row.choice == "apsched"]
    assert [(row.cap, row.step_ms is not None) for row in rows] == [
        ("none", True),
        ("device", False),
    ]


def test_a_step_that_does_not_fit_has_no_gap() -> None:
    """A gap of 0 says that the step is proven to be the fastest."""
    infeasible = SimpleNamespace(step_time_us=None)
    choice = SimpleNamespace(
        kept=frozenset(), kept_bytes=0, fits=False, results=(infeasible, infeasible)
    )
    answer = SimpleNamespace(gap=0.0)
    (case,) = SMOKE
    assert _row(case, "device", "apsched", choice, 3, answer, 1.0).gap is None  # type: ignore[arg-type]


def test_a_faster_choice_under_the_same_cap_is_found() -> None:
    fast = replace(ROW, step_ms=2.9)
    assert beaten([fast, FOUND]) == [fast]
    assert beaten([replace(fast, cap="less"), ROW, FOUND]) == []
    assert beaten([replace(ROW, step_ms=None), FOUND]) == []


def test_the_page_has_the_figures_of_the_wide_table() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs/keep.md").read_text()
    (stated,) = re.findall(
        r"`auto` is ([\d.]+) to ([\d.]+) % faster than `none` \(([\d.]+) % in the median\) and"
        r" up to ([\d.]+) % faster than the best choice of people"
        r" \(70B, fsdp=64, 2048 tokens, `a100-efa`",
        text,
    )
    steps: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in json.loads((root / "benchmarks/results/2026-11-29-keep-wide.json").read_text()):
        if row["step_ms"] is not None:
            steps[row["case"], row["cap"]][row["choice"]] = row["step_ms"]
    none, people = [], {}
    for which, step in steps.items():
        ms = step.pop("apsched")
        none.append(100 * (1 - ms / step["none"]))
        people[which] = 100 * (1 - ms / min(step.values()))
    assert stated[0] == f"{min(none):.3f}"
    assert stated[1:] == (f"{max(none):.1f}", f"{median(none):.1f}", f"{max(people.values()):.1f}")
    assert max(people, key=people.__getitem__) == (
        "llama3-70b fsdp=64, 2048 tokens, a100-efa",
        "device",
    )


def test_the_page_has_the_figures_of_the_least_memory() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs/keep.md").read_text()
    (stated,) = re.findall(
        r"`auto` keeps none in any of the (\d+) cases \(`--floor`, 30 November 2026\)\. Gaps are"
        r" wider there: ([\d.]+) to ([\d.]+) %, at most 1 % in (\d+) cases, at most 3 % in (\d+),",
        text,
    )
    results = json.loads((root / "benchmarks/results/2026-11-30-keep-floor.json").read_text())
    rows = [Row(**row) for row in results]
    assert not beaten(rows)
    found = [row for row in rows if row.choice == "apsched"]
    assert {row.case for row in found} == {str(case) for case in FLOOR}
    assert all(row.num_kept == row.num_in_node == 0 for row in found)
    gaps = [100 * row.gap for row in found if row.gap is not None]
    few, some = (sum(gap <= most for gap in gaps) for most in (1, 3))
    assert stated == (str(len(gaps)), f"{min(gaps):.1f}", f"{max(gaps):.1f}", str(few), str(some))
