"""The benchmark of moved compute: replays under noise, verdicts, and its tables."""

from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from benchmarks.common.grid import COMPUTE_MOVE, MOVES_GRID, TORCH_PEAK, more_memory
from benchmarks.common.records import CaseRecord, Noise, load_run, save_run
from benchmarks.common.table import markdown
from benchmarks.moves import __main__ as moves
from benchmarks.moves import noise
from benchmarks.moves.figures import MOVES_REPORT, pairs, ratio_limit, verdicts
from tests.benchmarks.test_solver import CASE, ROW, TORCH, run_of
from tests.helpers.problems.by_hand import ByHand, line, schedule

KIB = 1024


def gradients() -> Problem:
    """A gradient that is reduced in 10 us beside compute of 20 us a node; its shard is scaled
    behind the wait.
    """
    b = ByHand(prices={"reduce_scatter": line(10_000)})
    x = b.input("x", 512)
    y = b.compute("y", 20_000, x, size=8 * KIB)
    g = b.wait(
        "g", b.start("reduce_scatter", "rs", y, 8 * KIB, KIB, launch_ticks=1_000, epilogue=(6,))
    )
    middle = b.compute("middle", 20_000, x, size=512)
    end = b.compute("end", 20_000, middle, size=512)
    scaled = b.compute("scaled", 1_000, g, size=KIB)
    return b.output(scaled, end)


def test_without_noise_a_replay_is_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gradients()
    monkeypatch.setattr(noise, "SIGMAS", (0.0, 0.3))
    for order in ("x y rs g scaled middle end output", "x y rs middle g scaled end output"):
        made = schedule(problem, order)
        still, noisy = noise.noise_of(problem, made, "as solved")
        ticks = simulate(problem, made).step_time_ticks
        assert (still.mean_ticks, still.worst_ticks) == (ticks, ticks)
        assert noisy.worst_ticks > noisy.mean_ticks != ticks
        assert noise.noise_of(problem, made, "as solved") == (still, noisy)


def test_waits_are_moved_as_said() -> None:
    problem = gradients()
    made = schedule(problem, "x y rs middle end g scaled output")
    assert noise.waits_when_done(problem, made) == schedule(
        problem, "x y rs middle g end scaled output"
    )
    early = schedule(problem, "x y rs middle g scaled end output")
    late = noise.waits_at_the_end(problem, early)
    assert late == made
    for other in (made, late):
        assert verify(problem, other, Caps()) == ()
    assert simulate(problem, late).peak_memory_bytes >= simulate(problem, early).peak_memory_bytes


def solved(**changes) -> CaseRecord:
    """Return a case with one graph: torch takes 1.1 ms, ours 1 ms as captured and 0.95 ms moved."""
    quiet = Noise(
        waits="as solved", sigma=0.2, mean_ticks=1_000_000, worst_ticks=1_100_000, peak_bytes=2**30
    )
    captured = replace(ROW, cap=TORCH_PEAK, noise=(quiet, replace(quiet, sigma=0.5)))
    moved = replace(
        captured,
        step_ticks=950_000,
        bound_ticks=949_000,
        max_compute_move=COMPUTE_MOVE,
        moved_nodes=7,
        compute_move=30,
        noise=tuple(replace(n, mean_ticks=960_000) for n in captured.noise),
    )
    more = replace(moved, cap=more_memory(0.1), memory_cap_bytes=2**30 * 11 // 10)
    near = replace(moved, max_compute_move=25, step_ticks=980_000)
    return replace(
        CASE,
        rows=(captured, near, replace(moved, **changes), more),
        torch=(replace(TORCH, ours=None),),
    )


def words(case: CaseRecord) -> dict[str, str]:
    return {v.figure: v.word for v in verdicts(run_of(case))}


def test_what_is_reached_passes() -> None:
    assert set(words(solved()).values()) == {"pass"}
    (pair,) = pairs(run_of(solved()))
    assert pair.ratio == pytest.approx(0.95 / 1.1)
    assert pair.time_ratio == 1.0


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({"step_ticks": 1_105_000}, "step time over torch's, at the peak of torch's schedule"),
        ({"bound_ticks": 930_000}, "proven gap with moves"),
        ({"solve_cpu_s": 4.0}, "processor time of solve + write-back over that without moves"),
        ({"step_ticks": 1_002_000}, "step time over that with compute as captured"),
        ({"round_trip_exact": False}, "graph after write-back, exported and simulated again"),
        (
            {
                "noise": (
                    Noise(
                        waits="as solved",
                        sigma=0.5,
                        mean_ticks=1_000_001,
                        worst_ticks=1_100_000,
                        peak_bytes=1,
                    ),
                )
            },
            "mean step time under noise over that with compute as captured",
        ),
        ({"status": "failed", "message": "it broke"}, "solved and checked by verify"),
        ({"status": "infeasible"}, "schedules within the peak of torch's"),
        ({"peak_bytes": 2**30 + 512}, "schedules within the peak of torch's"),
    ],
)
def test_what_is_not_reached_is_missed(changes: dict, figure: str) -> None:
    assert words(solved(**changes))[figure] == "missed"


def test_what_needs_more_memory_as_captured_is_no_comparison() -> None:
    """As captured faster than moved, but above torch's peak: marked in the table, and nobody misses
    anything.
    """
    case = solved()
    captured, near, moved, more = case.rows
    case = replace(
        case,
        rows=(
            replace(captured, step_ticks=940_000, peak_bytes=case.torch[0].peak_bytes + 512),
            near,
            moved,
            more,
        ),
    )
    (pair,) = pairs(run_of(case))
    assert pair.over_captured is None
    assert words(case)["step time over that with compute as captured"] == "not measured"
    assert "| 0.940 + |" in markdown(run_of(case), "", MOVES_REPORT)


def test_a_goal_that_no_schedule_reaches_is_told() -> None:
    """Backward must reach 0.88 of torch's step time; where the bound is above that, nobody can."""
    slow = replace(solved(step_ticks=1_090_000, bound_ticks=1_080_000))
    slow = replace(
        slow,
        rows=tuple(replace(row, direction="backward") for row in slow.rows),
        torch=(replace(slow.torch[0], direction="backward"),),
    )
    (miss,) = next(
        v for v in verdicts(run_of(slow)) if v.figure.startswith("step time over torch's")
    ).misses
    assert "no schedule can" in miss
    assert ratio_limit("deepseek-v3-16b", "forward") == 0.95


def test_numbers_and_tables(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "2026-01-02-moves.json"
    save_run(file, run_of(solved()))
    assert load_run(file) == run_of(solved())
    assert moves.main(["--table", str(file)]) == 0
    text = file.with_suffix(".md").read_text()
    assert "| a case | forward | compute | 1.00 | 1.100 | 1.000 | 0.950 | 0.8636 | 1 |" in text
    assert "torch's peak + 10 %" in text
    tables = [
        part.splitlines()
        for part in markdown(run_of(solved()), "", MOVES_REPORT).split("\n\n")
        if part.startswith("|")
    ]
    assert len(tables) == 5
    assert "| a case | forward | 25 | 0.980 | 0.9800 |" in text
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1
    assert "Verdicts" in capsys.readouterr().out


def test_the_grid_has_the_meshes_that_were_asked_for() -> None:
    assert len({case.name for case in MOVES_GRID}) == len(MOVES_GRID) == 8
    assert sum("batch" in case.name for case in MOVES_GRID) == 4
    assert all("tp=" in case.mesh or "ep=" in case.mesh for case in MOVES_GRID)
