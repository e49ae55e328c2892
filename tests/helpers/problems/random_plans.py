"""Random plans for the random problems of ``strategies``: rules by name, some of which contradict
the data or each other.
"""

import random
from dataclasses import replace

from apsched.errors import InputError
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import Problem


def named(problem: Problem) -> Problem:
    """Return ``problem`` with names: collective c serves ``layers.(c // 2).w(c)``, compute node k
    is in ``layers.(k).mlp``.
    """
    place = {node: k for k, node in enumerate(problem.compute_order)}
    return replace(
        problem,
        modules=tuple(
            f"layers.{place[node]}.mlp" if node in place else ""
            for node in range(problem.num_nodes)
        ),
        collectives=tuple(
            replace(c, module=f"layers.{i // 2}.w{i}") for i, c in enumerate(problem.collectives)
        ),
    )


def random_plan(rng: random.Random, problem: Problem) -> Plan:
    """Return one to three rules, each about one collective, a layer, or several."""
    last = len(problem.collectives) - 1
    rules = []
    for _ in range(rng.randint(1, 3)):
        match = rng.choice(
            (
                r".*",
                r".*",
                rf"layers\.{rng.randint(0, last // 2)}\..*",
                rf".*\.w{rng.randint(0, last)}",
                r".*\.w[0-2]",
            )
        )
        kind = rng.choice((None, None, "all_gather", "reduce_scatter", "all_reduce"))
        asked = rng.choice(
            ("forbid", "group", "group", "group", "by", "pin", "prefetch", "start", "rank")
        )
        also = {} if rng.random() < 0.7 else {"prefetch": rng.randint(0, 3)}
        match asked:
            case "forbid" | "pin":
                rules.append(Rule(match=match, kind=kind, **{asked: True}))
            case "group":
                rules.append(
                    Rule(match=match, kind=kind, group=True, closed=rng.random() < 0.6, **also)
                )
            case "by":
                rules.append(
                    Rule(
                        match=r"layers\.(\d+)\..*",
                        kind=kind,
                        group=True,
                        by=r"\1",
                        closed=rng.random() < 0.6,
                        **also,
                    )
                )
            case "prefetch":
                rules.append(Rule(match=match, kind=kind, prefetch=rng.randint(0, 4)))
            case "start":
                rules.append(
                    Rule(
                        match=match,
                        kind=kind,
                        start=rf"layers\.{rng.randrange(len(problem.compute_order))}",
                    )
                )
            case "rank":
                rules.append(Rule(match=match, kind=kind, start=rng.randrange(problem.num_nodes)))
    return Plan(tuple(rules))


def planned(rng: random.Random, problem: Problem, *, tries: int = 20) -> Problem:
    """Return ``problem`` with names, under a random plan that does not contradict itself; the
    problem as it is where none was found.
    """
    problem = named(problem)
    for _ in range(tries):
        try:
            under = restricted(problem, random_plan(rng, problem))
        except InputError:
            continue
        if under.rules:
            return under
    return problem
