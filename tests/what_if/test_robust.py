"""Scenarios: what is sampled, what a schedule takes in one, and that the choice is never worse than
to believe the costs.
"""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

import apsched
from apsched.cli.main import main
from apsched.config import Caps, SolveOptions
from apsched.costs.price_curve import PriceCurve
from apsched.errors import InputError
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, check_problem, with_contention
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.what_if.robust import made_robust
from apsched.what_if.robustness import Spread
from apsched.what_if.scenarios import (
    Replay,
    Scenario,
    ScenarioOptions,
    priced_as,
    sampled,
    scenarios,
    with_slower_network,
)
from tests.helpers.problems.contended import contended
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import layered_problem, random_problem

QUICK = SolveOptions(budget=0.2)


def even(problem: Problem, **factors: float) -> Scenario:
    ones = {
        "of_node": (1.0,) * problem.num_nodes,
        "of_collective": (1.0,) * len(problem.collectives),
    }
    return Scenario(**ones, **factors)


def test_factors_have_mean_one_and_spread_as_asked():
    problem = replace(
        random_problem(random.Random(1)), kinds=random_problem(random.Random(1)).kinds * 1000
    )
    factors = np.log(sampled(problem, 0.3, 7).of_node)
    assert abs(np.std(factors) - 0.3) < 0.01
    assert abs(np.mean(np.exp(factors)) - 1) < 0.01
    whole = np.log(
        [sampled(random_problem(random.Random(1)), 0.3, seed).of_network for seed in range(2000)]
    )
    assert abs(np.std(whole) - 0.3) < 0.02


def test_the_same_seed_gives_the_same_and_more_goes_on():
    problem = random_problem(random.Random(1))
    few, many = (scenarios(problem, ScenarioOptions(count=count), 3) for count in (2, 5))
    assert many[:2] == few
    assert len({scenario.of_network for scenario in many}) == 5
    assert scenarios(problem, ScenarioOptions(count=2), 4) != few


@pytest.mark.parametrize("with_links", [False, True])
def test_costs_as_they_are_give_the_step_time_as_it_is(with_links: bool):
    for seed in range(40):
        problem = random_problem(random.Random(seed), max_collectives=8, max_compute=6)
        problem = contended(problem, seed) if with_links else problem
        schedule = random_schedule(problem, seed)
        assert (
            Replay(problem, schedule).step_time_ticks(even(problem))
            == simulate(problem, schedule).step_time_ticks
        )


def test_buckets_change_no_luck():
    """All transfers of one key together take as long alone as in buckets, but for latency, which is
    none here.
    """
    compared = 0
    for seed in range(40):
        problem = random_problem(random.Random(seed), max_collectives=8, max_compute=6)
        price = PriceCurve(size_bytes=(0, 1), price_ticks=(0, 1000))
        problem = replace(
            problem,
            keys=tuple(
                replace(key, price=price, coalesced_member_ticks=None) for key in problem.keys
            ),
        )
        schedule, scenario = random_schedule(problem, seed), sampled(problem, 0.5, seed)
        totals = []
        for each in (schedule, as_captured(problem.num_nodes)):
            replay = Replay(problem, each)
            totals.append(
                sum(
                    ticks * sum(w * scenario.of_collective[c] for c, w in weights)
                    for weights, _, ticks, _ in replay._transfers
                )
            )
        assert totals[0] == pytest.approx(totals[1])
        compared += bool(schedule.buckets)
    assert compared >= 20


def test_a_replay_is_what_the_repriced_problem_takes():
    """Where nothing is bucketed and collectives of a key share their factor, replay and new prices
    agree.
    """
    for seed in range(20):
        problem = layered_problem(random.Random(seed), num_layers=2)
        rng = random.Random(seed)
        factors = tuple(rng.choice((1.0, 2.0, 3.0)) for _ in range(problem.num_nodes))
        scenario = replace(even(problem, of_compute=2.0, of_network=3.0), of_node=factors)
        check_problem(priced_as(problem, scenario))
        schedule = as_captured(problem.num_nodes)
        rounding = 3 * len(
            problem.collectives
        )  # a price between two points of a curve is rounded before, or after
        replayed = Replay(problem, schedule).step_time_ticks(scenario)
        assert (
            abs(replayed - simulate(priced_as(problem, scenario), schedule).step_time_ticks)
            <= rounding
        )
        slower = simulate(with_slower_network(problem, 3.0), schedule).step_time_ticks
        assert (
            abs(slower - Replay(problem, schedule).step_time_ticks(even(problem, of_network=3.0)))
            <= rounding
        )


def test_the_measure_decides_and_the_other_one_among_equals():
    spread = Spread(name="", step_time_ticks=1, mean_ticks=2, worst_ticks=3)
    measured = [
        spread.measured(ScenarioOptions(count=1, measure=measure)) for measure in ("mean", "worst")
    ]
    assert measured == [(2, 3), (3, 2)]


@pytest.mark.parametrize("measure", ["mean", "worst"])
def test_never_worse_by_the_measure_nor_than_a_baseline(measure: str):
    changed = 0
    for seed in (*range(5), 14):
        problem = random_problem(random.Random(seed), max_collectives=4, max_compute=4)
        problem = (
            with_contention(problem, Contention(compute_slowdown=(6, 5))) if seed % 2 else problem
        )
        caps = Caps(
            memory_cap_bytes=simulate(problem, as_captured(problem.num_nodes)).peak_memory_bytes
        )
        believed = solve(problem, caps, QUICK)
        asked = ScenarioOptions(count=8, noise=0.5, measure=measure)
        answer, said = made_robust(problem, caps, QUICK, believed, asked)
        assert answer.best is not None
        assert believed.best is not None
        assert said is not None
        name = f"{measure}_ticks"
        assert getattr(said.chosen, name) <= getattr(said.as_priced, name)
        assert verify(problem, answer.best.schedule, caps) == ()
        assert all(
            answer.best.step_time_ticks <= b.step_time_ticks for b in answer.baselines if b.fits
        )
        assert answer.bound_ticks <= answer.best.step_time_ticks
        replayed = [
            Replay(problem, answer.best.schedule).step_time_ticks(s)
            for s in scenarios(problem, asked, QUICK.seed)
        ]
        assert (said.chosen.worst_ticks, said.chosen.mean_ticks) == (
            max(replayed),
            round(sum(replayed) / 8),
        )
        assert made_robust(problem, caps, QUICK, believed, asked) == (answer, said)
        of_a_trial = replace(believed, may_improve=True, lacks_floor=True)
        robust, _ = made_robust(problem, caps, QUICK, of_a_trial, asked)
        assert (robust.may_improve, robust.lacks_floor) == (True, True)
        changed += answer.best.schedule != believed.best.schedule
    assert changed, "no scenario ever made a difference"


def test_the_api_says_what_it_takes():
    problem = random_problem(random.Random(3), max_collectives=5, max_compute=4)
    result = apsched.solve(problem, scenarios=4, noise=0.3, robust="mean", options=QUICK)
    assert result.robustness is not None
    assert result.robustness.options == ScenarioOptions(count=4, noise=0.3, measure="mean")
    assert result.robustness.chosen.step_time_ticks == result.answer.best.step_time_ticks
    assert apsched.solve(problem, options=QUICK).robustness is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": 0}, "from 1 to"),
        ({"count": 1, "noise": 0.0}, "above 0"),
        ({"count": 1, "measure": "best"}, "mean or worst"),
    ],
)
def test_the_impossible_is_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        ScenarioOptions(**wrong)


def test_on_the_command_line(tmp_path, capsys):
    source = [
        "llama3-debug",
        "--layers",
        "1",
        "--mesh",
        "fsdp=4",
        "--memory-cap",
        "none",
        "--budget",
        "0",
        "--seq",
        "64",
        "--direction",
        "forward",
    ]
    main(["solve", *source, "--scenarios", "3", "--noise", "0.3", "-o", str(tmp_path)])
    out = capsys.readouterr().out
    assert "worst above as priced" in out
    assert "3 scenarios, noise 0.3: in the worst of them" in out
    (graph,) = json.loads((tmp_path / "result.json").read_text())["graphs"]
    assert graph["robustness"]["count"] == 3
    assert graph["robustness"]["chosen"] in graph["robustness"]["schedules"]
    assert main(["solve", *source, "--noise", "0.3"]) == 2
    assert "state their number with --scenarios" in capsys.readouterr().err
