"""Rules of a plan about what is kept: the choice respects them, and what cannot is refused."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import apsched
from apsched.api import solve
from apsched.capture.captured import Capture
from apsched.cli.main import main
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.pipeline.solve_graph import SolveRequest, under_plan
from apsched.problem.plan.rules import Plan, Rule
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.solver.bounds.whole_step import seam_bytes
from apsched.whole_step.bounds import bounds_of, prices_of
from apsched.whole_step.choices import Choice
from apsched.whole_step.pair import Step
from apsched.whole_step.rules import by_rules
from apsched.whole_step.search import solve_step
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers
from tests.helpers.problems.by_hand_plans import gathers_and_reductions
from tests.whole_step.test_search import every_choice

WEIGHTS = [f"weights.{k}" for k in range(3)]


@cache
def layers() -> Capture:
    return captured_layers((32, 64, 128, 64))


def step_under(*rules: Rule, prices: FlatPrices | None = None) -> Step:
    plan = Plan(rules, chooses_kept=True)
    request = SolveRequest(
        caps=Caps(),
        memory_cap=MemoryCap(),
        options=SolveOptions(time_slack=0.0, budget=0.0),
        plan=plan,
    )
    graphs = loaded_layers(layers(), prices or FlatPrices(bytes_per_us=150.0))
    return Step.of(under_plan(graphs, request), request, Progress(quiet=True))


def test_the_choice_is_the_best_of_those_that_rules_allow() -> None:
    """Of all that keep the first weight and gather the second again; the bound is over these."""
    rules = Rule(match=r"weights\.0", keep=True), Rule(match=r"weights\.1", keep=False)
    step = step_under(*rules)
    assert [p.name for p in step.undecided] == [WEIGHTS[2]]
    assert len(step.undecided[0].gathers) == 1
    answer = solve_step(step)
    allowed = [Choice([WEIGHTS[0]]), Choice([WEIGHTS[0], WEIGHTS[2]])]
    assert set(step.solved) <= set(allowed)
    least = min(step.solve(kept).step_ticks for kept in allowed)
    assert answer.bound.ticks <= least == answer.best.step_ticks
    assert answer.best.kept == allowed[1]  # the network binds
    assert (answer.num_parameters, answer.num_by_rule) == (3, 2)
    free = solve_step(step_under())
    assert free.best.kept == Choice(WEIGHTS)
    assert free.bound.ticks < answer.bound.ticks


def test_what_rules_gather_shares_buckets_with_what_is_gathered_by_choice() -> None:
    """One latency pays for both; the bound must not count it for what the rules gather, and a share
    of it for the rest.
    """
    prices = FlatPrices(bytes_per_us=50_000.0, latency_us=400.0)
    step = step_under(Rule(match=r"weights\.[01]", keep=False), prices=prices)
    (bound,) = bounds_of(step, prices_of(step))
    again, kept = (step.solve(choice).step_ticks for choice in (Choice(), Choice([WEIGHTS[2]])))
    assert bound.of_choice([]).ticks <= again
    assert bound.of_choice([0]).ticks <= kept


def test_memory_that_rules_take_is_not_free() -> None:
    """Under each cap the answer is the best of what fits; the kept shards count, too."""
    step = step_under(Rule(match=r"weights\.1", keep=True))
    whole = {p.name: p.size_bytes for p in step.parameters}
    floor = max(r.answer.floor_memory_bytes for r in step.solve(step.always).results)
    floor += step.beside_bytes(step.always)
    names = [WEIGHTS[0], WEIGHTS[2]]
    (bound,) = bounds_of(step, prices_of(step))
    rows = [row for row in bound.rows if any(row.again)]
    assert rows
    for row in rows:  # collectives are those of backward with that weight kept
        assert min(row.again) > 0
    for room in (0, whole[WEIGHTS[0]], 4 * sum(whole.values())):
        tight = replace(step, cap_bytes=(floor + room,) * 2, solved={})
        given = seam_bytes(*(graph.problem for graph in step.least))[1]
        assert (tight.free_bytes or 0) <= floor + room - given - step.beside_bytes(step.always)
        answer = solve_step(tight)
        solved = [tight.solve(kept | step.always) for kept in every_choice(names)]
        least = min(s.step_ticks for s in solved if s.fits)
        assert answer.bound.ticks <= least == answer.best.step_ticks
        assert answer.best.peak_bytes <= floor + room


def test_a_rule_that_decides_on_nothing_or_twice_is_refused() -> None:
    def says(*rules: Rule) -> tuple[Choice, Choice]:
        return by_rules(Plan(rules), WEIGHTS)

    again = Rule(match=r"weights\.[01]", keep=False)
    assert says(again, Rule(match=r".*2", keep=True)) == (Choice(WEIGHTS[2:]), Choice(WEIGHTS[:2]))
    with pytest.raises(
        InputError, match=r"rule 1 \(match 'weight\\.0': keep\) matches no.*nearest"
    ):
        says(Rule(match=r"weight\.0", keep=True))
    with pytest.raises(InputError, match=r"rule 1 .* and rule 2 .*: weights.0 cannot be kept and"):
        says(again, Rule(match=r"weights\..*", keep=True))


def test_a_parameter_that_one_graph_gathers_is_not_kept_already() -> None:
    def says(keep: bool) -> tuple[Choice, Choice]:
        rule = Rule(match=r"tok_embeddings\..*", keep=keep)
        return by_rules(Plan((rule,)), WEIGHTS, [*WEIGHTS, "tok_embeddings.weight"])

    assert says(keep=False) == (Choice(), Choice())
    with pytest.raises(InputError, match="matches no parameter that forward and backward both"):
        says(keep=True)
    with pytest.raises(InputError, match="matches no parameter"):
        by_rules(Plan((Rule(match="none", keep=False),)), WEIGHTS, WEIGHTS)


def test_the_floor_is_that_of_what_rules_keep() -> None:
    step = step_under(Rule(match=r"weights\..*", keep=True))
    at_floor = step.with_cap(MemoryCap(size_bytes=0, above_floor=True))
    least = step.solve(step.always).least_bytes
    assert at_floor.cap_bytes == (least, least)
    assert at_floor.solve(step.always).fits
    assert least > step_under().solve(Choice()).least_bytes


def test_who_does_not_choose_what_is_kept_refuses_such_rules() -> None:
    """A rule is never passed over in silence."""
    plan = Plan((Rule(match=r".*", keep=True),))
    with pytest.raises(InputError, match=r"rule 1 .*state --keep auto \(keep=\"auto\" in Python\)"):
        solve(gathers_and_reductions(), plan=plan)
    for keep in (None, "all", "none", ["a"]):
        with pytest.raises(InputError, match="state --keep auto"):
            apsched.backend(keep=keep, plan=plan)
    assert apsched.backend(keep="auto", plan=plan).settings.solve_request.plan.chooses_kept


@pytest.mark.slow
def test_solve_and_studies_respect_a_plan_file(tmp_path: Path, capsys) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[[rule]]\nmatch = 'layers\\..*'\nkeep = false\n")
    sizes = ["--mesh", "fsdp=4", "--seq", "32", "--layers", "2", "--budget", "0"]
    asked = ["solve", "llama3-debug", *sizes, "--plan", str(plan), "-o", str(tmp_path / "out")]
    assert main([*asked, "--keep", "auto"]) == 0
    assert "gathered again (18 as rules of the plan say)" in capsys.readouterr().out
    kept = (tmp_path / "out" / "kept.txt").read_text().splitlines()
    assert kept
    assert not any(name.startswith("layers.") for name in kept)
    for keep in ("none", "all"):
        assert main([*asked, "--keep", keep]) == 2
        assert "rule 1 (match 'layers\\..*': gather again)" in capsys.readouterr().err
    study = ["study", "llama3-debug", *sizes, "--plan", str(plan), "--jobs", "1"]
    assert main([*study, "--keep", "none", "-o", str(tmp_path / "study")]) == 2
    assert "state --keep auto" in capsys.readouterr().err
