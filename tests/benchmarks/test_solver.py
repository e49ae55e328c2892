"""What the benchmark makes of its numbers: exponents, verdicts, tables, and runs that were taken up
again.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from apsched.errors import InputError
from benchmarks.common import case as case_process
from benchmarks.common.figures import (
    Verdict,
    exponent,
    gap_on_exposed,
    growth,
    time_ratio,
    torch_ratio,
    verdicts,
)
from benchmarks.common.grid import CAPS, GRID, SMOKE, Case, layer_bytes
from benchmarks.common.meters import held_bytes, peak_bytes, reset_peak, timed
from benchmarks.common.processes import Asked, CaseProcesses
from benchmarks.common.records import (
    Again,
    Baseline,
    CaseRecord,
    GraphSize,
    Memory,
    Row,
    RunRecord,
    TorchRun,
    load_case,
    load_run,
    save_run,
)
from benchmarks.common.table import SOLVER_REPORT, markdown
from benchmarks.solver import __main__ as solver
from tests.helpers.problems.by_hand import ByHand

ROW = Row(
    direction="forward",
    cap="floor",
    memory_cap_bytes=2**30,
    status="feasible",
    step_ticks=1_000_000,
    fastest_ticks=1_000_000,
    bound_ticks=999_500,
    bound_source="compute",
    exposed_ticks=2_000,
    peak_bytes=2**30,
    peak_bound_bytes=3 * 2**28,
    num_launches=40,
    launches_bound=30,
    baselines=(
        Baseline(name="as_captured", step_ticks=1_500_000, fits=True),
        Baseline(name="greedy_bytes", step_ticks=900_000, fits=False),
    ),
    round_trip_exact=True,
    solve_cpu_s=0.75,
    write_back_cpu_s=0.25,
)
GRAPH = GraphSize(
    direction="forward",
    num_nodes=4000,
    num_collectives=300,
    compute_ticks=990_000,
    layer_bytes=2**20,
    floor_bytes=2**30,
    floor_bound_bytes=2**30,
)
TORCH = TorchRun(
    direction="forward",
    name="inductor",
    step_ticks=1_100_000,
    peak_bytes=2**30,
    cpu_s=2.0,
    ours=ROW,
)
CASE = CaseRecord(
    case="a case",
    model="llama3-8b",
    mesh="fsdp=64",
    seq_len=8192,
    commit="abc",
    finished=True,
    graphs=(GRAPH,),
    rows=(ROW, replace(ROW, cap="none", memory_cap_bytes=None)),
    torch=(TORCH,),
    memory=Memory(torch_bytes=10**9, solver_peak_bytes=2 * 10**9),
    again=(Again(direction="forward", cap="floor", how="1 core", same_bytes=True),),
)


def run_of(*cases: CaseRecord) -> RunRecord:
    return RunRecord(date="2026-01-02", environment={"cores": "2"}, cases=cases)


def verdict(case: CaseRecord, figure: str) -> Verdict:
    """Return the first verdict whose figure and demand hold ``figure``."""
    return next(v for v in verdicts(run_of(case)) if figure in f"{v.figure}: {v.must}")


def with_row(**changes: object) -> CaseRecord:
    return replace(CASE, rows=(replace(ROW, **changes),))


def test_a_run_that_reaches_everything_passes() -> None:
    found = {f"{v.figure}: {v.must}": v.word for v in verdicts(run_of(CASE))}
    assert {word for name, word in found.items() if not name.startswith("growth")} == {"pass"}
    assert found["growth of time with nodes: exponent ≤ 1.3"] == "not measured"


@pytest.mark.parametrize(
    ("figure", "case", "misses"),
    [
        (
            "≤ 1 %",
            with_row(bound_ticks=989_000),
            ["a case, forward, floor: 1.100 % (of exposed time 110.0 %; bound from compute)"],
        ),
        ("≤ 0.1 %", with_row(bound_ticks=998_000), ["only 0 of 1 (0 with the slack spent)"]),
        (
            "each baseline",
            with_row(step_ticks=1_500_001),
            ["a case, forward, floor: as_captured is faster"],
        ),
        (
            "never above",
            with_row(bound_ticks=1_000_001),
            ["a case, forward, floor: the bound is above the step time"],
        ),
        (
            "write-back, exported",
            with_row(round_trip_exact=False),
            ["a case, forward, floor: not the claimed figures"],
        ),
        (
            "schedules found",
            with_row(status="failed", message="RuntimeError: no"),
            ["a case, forward, floor: failed, RuntimeError: no"],
        ),
        (
            "schedules found",
            replace(CASE, finished=False),
            ["a case: did not finish (interrupted)"],
        ),
        (
            "torch's schedulers",
            replace(CASE, torch=(replace(TORCH, step_ticks=999_999),)),
            ["a case, forward, inductor: ratio 1.0000"],
        ),
        (
            "torch's schedulers",
            replace(
                CASE,
                torch=(
                    replace(TORCH, ours=replace(ROW, status="infeasible", message="too tight")),
                    TORCH,
                ),
            ),
            ["a case, forward, inductor: infeasible, too tight"],
        ),
        (
            "processor time",
            with_row(solve_cpu_s=5.95),
            ["median 3.10", "a case, forward, floor: 3.10"],
        ),
        (
            "memory of",
            replace(CASE, memory=Memory(torch_bytes=10**9, solver_peak_bytes=3 * 10**9 + 10**7)),
            ["a case: 2.01 GB"],
        ),
        (
            "same input again",
            replace(CASE, again=(replace(CASE.again[0], same_bytes=False),)),
            ["a case, forward, 1 core: other bytes"],
        ),
    ],
)
def test_a_run_that_misses_says_where(figure: str, case: CaseRecord, misses: list[str]) -> None:
    assert list(verdict(case, figure).misses) == misses
    assert verdict(case, figure).word == "missed"
    assert misses[0] in markdown(run_of(case), "", SOLVER_REPORT)


def test_a_looser_cap_may_only_cost_the_slack() -> None:
    loose = replace(ROW, cap="none", memory_cap_bytes=None, step_ticks=1_001_000)
    assert verdict(replace(CASE, rows=(loose, ROW)), "looser").word == "pass"
    slower = replace(loose, step_ticks=1_010_000)
    assert verdict(replace(CASE, rows=(slower, ROW)), "looser").misses == (
        "a case, forward, none: 1.00 % slower than floor",
    )
    assert verdict(replace(CASE, rows=(ROW,)), "looser").word == "not measured"


def test_exactly_at_the_limit_passes() -> None:
    assert not verdict(with_row(bound_ticks=990_000), "≤ 1 %").misses
    assert not verdict(with_row(bound_ticks=999_000), "≤ 0.1 %").misses
    assert not verdict(with_row(step_ticks=1_500_000), "each baseline").misses
    assert not verdict(
        replace(CASE, torch=(replace(TORCH, step_ticks=1_000_000),)), "torch's schedulers"
    ).misses


def test_what_was_not_run_is_no_pass() -> None:
    here = replace(
        CASE,
        again=(
            Again(
                direction="forward",
                cap="floor",
                how="1 core",
                same_bytes=False,
                message="not run: no cores",
            ),
        ),
    )
    assert verdict(here, "same input again").word == "not measured"
    broken = replace(here, again=(replace(here.again[0], message="MemoryError"),))
    assert verdict(broken, "same input again").word == "missed"


def test_half_of_the_cases_may_be_above_a_tenth_of_a_percent() -> None:
    loose = replace(ROW, bound_ticks=995_000)
    assert verdict(replace(CASE, rows=(ROW, loose)), "≤ 0.1 %").word == "pass"
    assert (
        verdict(replace(CASE, rows=(ROW, loose, loose)), "≤ 0.1 %").found
        == "1 of 3 (1 with the slack spent)"
    )
    assert verdict(replace(CASE, rows=(ROW, loose, loose)), "≤ 0.1 %").word == "missed"


def test_ratios() -> None:
    assert time_ratio(CASE, ROW) == 0.5
    assert time_ratio(replace(CASE, torch=()), ROW) is None
    assert torch_ratio(TORCH) == pytest.approx(1.1)
    assert gap_on_exposed(ROW, GRAPH) == pytest.approx(500 / 10_000)
    assert ROW.best_baseline == ROW.baselines[0]  # the faster one does not fit


def test_exponent_is_the_slope_in_logarithms() -> None:
    sizes = [4_000, 8_000, 20_000, 40_000]
    assert exponent(sizes, [1e-6 * n**1.25 for n in sizes]) == pytest.approx(1.25)
    assert exponent([1, 10, 100], [1.0, 2.0, 100.0]) == pytest.approx(
        1.0
    )  # least squares, not the ends alone


def test_growth_is_that_of_one_family() -> None:
    meshes = {"llama3-8b": "fsdp=64", "llama3-70b": "fsdp=256", "llama3-405b": "fsdp=1024"}
    sizes = {"llama3-8b": 4_000, "llama3-70b": 10_000, "llama3-405b": 17_000}
    cases = [
        replace(
            CASE,
            case=model,
            model=model,
            mesh=meshes[model],
            graphs=(
                replace(GRAPH, num_nodes=n),
                replace(GRAPH, direction="backward", num_nodes=2 * n),
            ),
            rows=(
                replace(ROW, solve_cpu_s=n / 1000, write_back_cpu_s=0.0),
                replace(
                    ROW,
                    direction="backward",
                    solve_cpu_s=(2 * n / 1000) ** 1.5,
                    write_back_cpu_s=0.0,
                ),
            ),
        )
        for model, n in sizes.items()
    ]
    other = replace(CASE, case="tp", mesh="fsdp=8,tp=8", rows=(replace(ROW, solve_cpu_s=1e6),))
    (fit,) = growth(run_of(*cases, other))
    assert dict(fit.by_direction) == pytest.approx({"forward": 1.0, "backward": 1.5})
    assert (fit.least_nodes, fit.most_nodes) == (4_000, 34_000)
    assert fit.exponent > 1.5  # together: the longer graphs are also those of the slower direction
    assert (
        next(v for v in verdicts(run_of(*cases)) if v.figure.startswith("growth")).word == "missed"
    )
    assert growth(run_of(*cases[:2])) == ()


def test_numbers_survive_the_file(tmp_path: Path) -> None:
    run = run_of(
        CASE,
        replace(
            CASE, case="another", memory=None, torch=(replace(TORCH, ours=None, message="failed"),)
        ),
    )
    save_run(tmp_path / "run.json", run)
    assert load_run(tmp_path / "run.json") == run


@pytest.mark.parametrize("content", ["", "{}", '{"format": "another", "version": 1}', "[]"])
def test_a_file_without_numbers_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(InputError, match="expected the numbers of a run"):
        load_run(file)
    assert solver.main(["--table", str(file)]) == 2
    assert "benchmarks.solver: error:" in capsys.readouterr().err


def test_a_case_takes_the_place_of_an_earlier_one() -> None:
    later = replace(CASE, wall_s=3.0)
    assert run_of(CASE).with_case(later).cases == (later,)


def test_the_table_is_made_again_from_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "2026-01-02-solver.json", run_of(CASE))
    assert solver.main(["--table", str(tmp_path / "2026-01-02-solver.json")]) == 0
    text = (tmp_path / "2026-01-02-solver.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| a case | forward | floor |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    expected = [
        "a case",
        "forward",
        "floor",
        "feasible",
        "compute",
        "as_captured",
        "1.00",
        "1.000",
        "1.000",
        "0.050",
        "0.050",
        "0.002",
        "5.0",
    ]
    assert cells == [*expected, "1.5000", "1.00", "25.00", "40", "25.0", "1.0", "0.50"]
    assert (
        "| a case | forward | inductor | 1.00 | 1.100 | 1.000 | 1.1000 | 2.0 | 1.0 | 0.50 |" in text
    )
    assert "apsched at abc" in text
    assert "Verdicts" in capsys.readouterr().out


def test_notes_stand_in_the_table() -> None:
    assert markdown(run_of(CASE), "By hand: the bound is loose.\n", SOLVER_REPORT).endswith(
        "## Notes\n\nBy hand: the bound is loose.\n"
    )
    assert "## Notes" not in markdown(run_of(CASE), " \n", SOLVER_REPORT)


def test_every_table_has_as_many_cells_as_headings() -> None:
    broken = replace(ROW, status="failed", message="x | y")
    failed = replace(
        CASE, rows=(ROW, broken), torch=(TORCH, replace(TORCH, message="no")), memory=None
    )
    tables = [
        part.splitlines()
        for part in markdown(run_of(failed), "", SOLVER_REPORT).split("\n\n")
        if part.startswith("|")
    ]
    assert len(tables) == 5
    for lines in tables:
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_wrong_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--cases", "("],
        ["--cases", "no-such-model"],
        ["--caps", "floor,ceiling"],
        ["--timeout", "soon"],
    ):
        assert solver.main([*arguments, "--out", "nowhere"]) == 2
        assert "benchmarks.solver: error: --" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_the_grid_is_that_of_the_page() -> None:
    names = [case.name for case in GRID]
    assert len(set(names)) == len(names) == 11
    assert sum("seq=2048" in name for name in names) == 4
    assert any(case.again for case in GRID)
    assert any(case.again for case in SMOKE)
    assert CAPS == {"floor": 0, "floor+1 layer": 1, "floor+3 layers": 3, "none": None}


@pytest.mark.alone
def test_meters_measure() -> None:
    with timed() as used:
        block = bytearray(200 * 2**20)
    assert used.wall_s > 0
    assert used.cpu_s > 0
    before = held_bytes()
    assert peak_bytes() >= before
    del block
    reset_peak()
    assert peak_bytes() <= before - 150 * 2**20


def test_a_layer_is_the_largest_numbered_block() -> None:
    """Its gathers as allocated; reductions, collectives between compute and parts without a number
    do not count.
    """
    build = ByHand()
    x = build.input("x", 512)
    for name, kind, size, on_path in (
        ("layers.0.w", "all_gather", 1000, False),
        ("layers.0.v", "all_gather", 512, False),
        ("layers.1.w", "all_gather", 1400, False),
        ("layers.1.v", "all_gather", 9000, True),
        ("layers.1.u", "reduce_scatter", 9000, False),
        ("embedding", "all_gather", 90_000, False),
    ):
        build.wait(
            f"wait {name}", build.start(kind, name, x, 512, size, module=name, on_path=on_path)
        )
    assert layer_bytes(build.output()) == 1024 + 512


ASKED = Asked(caps=("none",), torch_up_to_nodes=None, commit="abc", timeout_s=3000)


def test_a_case_that_fails_is_kept_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results from before the failure are reported, too."""
    monkeypatch.setattr(
        case_process, "_warm_up", lambda _: case_process._WarmUp(cpu_s=1.5, held_bytes=0)
    )
    file = tmp_path / "case.json"
    file.write_text(
        json.dumps(
            {
                **asdict(ASKED),
                "case": asdict(Case(model="llama3-debug", mesh="fsdp=nonsense", seq_len=32)),
            }
        )
    )
    with pytest.raises(InputError):
        case_process.main([str(file)])
    record = load_case(file)
    assert not record.finished
    assert "nonsense" in record.message
    assert record.warm_up_cpu_s == 1.5


def test_a_process_that_breaks_is_a_case_that_did_not_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    record = CaseProcesses(ASKED).measure_one(GRID[0])
    assert not record.finished
    assert record.message == "exit status 1"
    assert record.case == GRID[0].name


@pytest.mark.alone
def test_a_case_that_takes_too_long_is_ended() -> None:
    record = CaseProcesses(replace(ASKED, timeout_s=1)).measure_one(
        Case(model="llama3-debug", mesh="fsdp=4", seq_len=32)
    )
    assert not record.finished
    assert record.message == "took more than 1 s"
    assert record.case == "llama3-debug fsdp=4 seq=32"


def test_a_run_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished cases are kept, others are measured again, and the rest goes on after one that
    failed.
    """
    first, second, third = GRID[0], GRID[1], GRID[2]
    ran: list[str] = []

    def measure_one(_: CaseProcesses, case: Case) -> CaseRecord:
        ran.append(case.name)
        broken = case is second and len(ran) < 4
        return replace(
            CASE, case=case.name, finished=not broken, message="broken" if broken else ""
        )

    monkeypatch.setattr(CaseProcesses, "measure_one", measure_one)
    wanted = ["--cases", "^llama3-8b fsdp=(64|256) seq=(8192|2048)", "--out", str(tmp_path)]
    assert solver.main(wanted) == 1  # one did not finish
    names = [case.name for case in (first, second, third, GRID[3])]
    assert ran == names
    assert solver.main([*wanted, "--resume"]) == 0
    assert ran == [*names, second.name]
    (file,) = tmp_path.glob("*-solver.json")
    assert [case.case for case in load_run(file).cases] == names


def test_an_interrupted_run_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_one(_: CaseProcesses, case: Case) -> CaseRecord:
        if case is GRID[1]:
            raise KeyboardInterrupt
        return replace(CASE, case=case.name)

    monkeypatch.setattr(CaseProcesses, "measure_one", measure_one)
    assert solver.main(["--out", str(tmp_path)]) == 130
    assert "--resume" in capsys.readouterr().err
    (file,) = tmp_path.glob("*-solver.json")
    assert [case.case for case in load_run(file).cases] == [GRID[0].name]
    assert GRID[0].name in file.with_suffix(".md").read_text()


@pytest.mark.alone
def test_cases_run_side_by_side_and_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes run at once; when the first is done and nobody wants more, the other is ended,
    and the rest never begins.
    """
    ran: list[str] = []
    run = CaseProcesses._run

    def sleeping(self: CaseProcesses, case: Case, command: object) -> str:
        ran.append(case.name)
        while len(ran) < 2:
            time.sleep(0.01)
        return run(self, case, ["sleep", "0" if case is GRID[1] else "3000"])

    monkeypatch.setattr(CaseProcesses, "_run", sleeping)
    with CaseProcesses(ASKED, 2) as processes:
        first = next(iter(processes.measure(GRID[:3])))
    assert first.case == GRID[1].name
    assert set(ran) >= {GRID[0].name, GRID[1].name}
    assert not processes._running
